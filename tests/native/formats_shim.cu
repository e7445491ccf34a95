// The portable arithmetic of plugins/kernels/common behind C functions over arrays, for the tests: compiled as C++ for
// the host, or by nvcc, which runs every function on the device. Scalar parameters are by value, arrays host memory.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/divide.cuh"
#include "kernels/common/e2m1.cuh"
#include "kernels/common/e4m3.cuh"
#include "kernels/common/float16.cuh"
#include "kernels/common/philox.cuh"

using namespace replayssm;

#if defined(__CUDACC__)
template <class Work>
__global__ void workKernel(Work work, size_t count) {
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) work(i);
}

// A copy of `host` on the device for as long as it lives; written back when `back`.
template <class T>
struct Copy {
  T* host;
  size_t bytes;
  bool back;
  T* device = nullptr;
  Copy(const T* at, size_t count, bool writes) : host(const_cast<T*>(at)), bytes(count * sizeof(T)), back(writes) {
    cudaMalloc(&device, bytes);
    cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  ~Copy() {
    if (back) cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
  }
};
#define RSSM_EACH __device__

template <class Work>
void forEach(const Work& work, size_t count) {
  workKernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(work, count);
  cudaDeviceSynchronize();
}
#else
template <class T>
struct Copy {
  T* device;
  Copy(const T* at, size_t, bool) : device(const_cast<T*>(at)) {}
};
#define RSSM_EACH

template <class Work>
void forEach(const Work& work, size_t count) {
  for (size_t i = 0; i < count; ++i) work(i);
}
#endif

namespace {

struct Nearest {
  int format;
  const float* x;
  uint16_t* code;
  RSSM_EACH void operator()(size_t i) const {
    switch (format) {
      case 0: code[i] = halfNearest(x[i]); break;
      case 1: code[i] = e4m3Nearest(x[i]); break;
      case 2: code[i] = static_cast<uint16_t>(e2m1Nearest(x[i])); break;
      default: code[i] = e4m3NearestPlain(x[i]);
    }
  }
};

struct Stochastic {
  int format;
  const float* x;
  const uint32_t* word;
  uint16_t* code;
  RSSM_EACH void operator()(size_t i) const {
    switch (format) {
      case 0: code[i] = halfStochastic(x[i], word[i]); break;
      case 1: code[i] = e4m3Stochastic(x[i], word[i]); break;
      default: code[i] = static_cast<uint16_t>(e2m1Stochastic(x[i], word[i]));
    }
  }
};

struct Words {
  StateRandom random;
  uint32_t *word, *complement;
  RSSM_EACH void operator()(size_t i) const {
    const uint32_t quad = static_cast<uint32_t>(i);
    const PhiloxWords four = random.words(quad);
    PhiloxWords both[2];
    random.complements(both, {quad ^ 1, quad});
    for (int e = 0; e < 4; ++e) {
      word[4 * i + e] = four.word[e];
      complement[4 * i + e] = both[1].word[e];
    }
  }
};

struct Invert {
  const float* x;
  float* result;
  RSSM_EACH void operator()(size_t i) const { result[i] = inverse(x[i]); }
};

struct Values {
  float* e4m3;
  float* e2m1;
  RSSM_EACH void operator()(size_t i) const {
    e4m3[i] = e4m3Value(static_cast<uint8_t>(i));
    e2m1[i] = e2m1Value(static_cast<uint32_t>(i & 15));
  }
};

struct Scales {
  const float* amax;
  float headScale;
  float* fp8;
  float* head;
  uint8_t* block;
  RSSM_EACH void operator()(size_t i) const {
    fp8[i] = e4m3Scale(amax[i]);
    head[i] = nvfp4HeadScale(amax[i]);
    block[i] = nvfp4BlockScale(amax[i], nvfp4BlockFactor(headScale));
  }
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void shim_nearest(int format, const float* x, uint16_t* code, size_t count) {
  Copy<float> in(x, count, false);
  Copy<uint16_t> out(code, count, true);
  forEach(Nearest{format, in.device, out.device}, count);
}

__attribute__((visibility("default"))) void shim_stochastic(int format, const float* x, const uint32_t* word,
                                                            uint16_t* code, size_t count) {
  Copy<float> in(x, count, false);
  Copy<uint32_t> words(word, count, false);
  Copy<uint16_t> out(code, count, true);
  forEach(Stochastic{format, in.device, words.device, out.device}, count);
}

__attribute__((visibility("default"))) void shim_words(uint64_t seed, uint32_t layer_head, uint32_t position,
                                                       uint32_t* word, uint32_t* complement, size_t quads) {
  Copy<uint32_t> out(word, 4 * quads, true), other(complement, 4 * quads, true);
  forEach(Words{{seed, layer_head, position}, out.device, other.device}, quads);
}

__attribute__((visibility("default"))) void shim_invert(const float* x, float* result, size_t count) {
  Copy<float> in(x, count, false);
  Copy<float> out(result, count, true);
  forEach(Invert{in.device, out.device}, count);
}

__attribute__((visibility("default"))) void shim_values(float* e4m3, float* e2m1) {
  Copy<float> wide(e4m3, 256, true), narrow(e2m1, 256, true);
  forEach(Values{wide.device, narrow.device}, 256);
}

__attribute__((visibility("default"))) void shim_scales(const float* amax, float head_scale, float* fp8, float* head,
                                                        uint8_t* block, size_t count) {
  Copy<float> in(amax, count, false);
  Copy<float> first(fp8, count, true), second(head, count, true);
  Copy<uint8_t> third(block, count, true);
  forEach(Scales{in.device, head_scale, first.device, second.device, third.device}, count);
}

}  // extern "C"
