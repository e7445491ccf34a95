// A plain step of GDN (paper, Eq. 9-11). On a flush, for few rows at every step, the committed records are folded into the
// state's registers before the step's inputs are looked at, so that what follows these is what the recurrence itself does
// with one token: the shortest chain. Elsewhere they are weighed for the step's key and query: the fewest instructions.
//
// Lane (g, c) = (lane / 16, lane % 16) holds rows 4g .. 4g + 3 of its warp's and columns 4c .. 4c + 3 of either half.
#pragma once

#include "../common/gdn.cuh"
#include "step.cuh"

namespace replayssm::plain {

template <class Traits>
struct GdnStep : Step<Traits> {
  using Act = typename Traits::Act;
  using Step<Traits>::p;
  using Step<Traits>::shared;
  using Step<Traits>::layout;
  using Step<Traits>::lane;
  using Step<Traits>::pending;
  using Step<Traits>::weight;
  static constexpr int kOwn = Traits::kWarpRows / 2, kHalves = 2;  // rows of a lane, pieces of four columns
  static constexpr bool kWaitsLate = Traits::kFolds;  // else there is nothing to do before the inputs are there
  static constexpr int kResidentWarps = 16;  // of a multiprocessor: leaves a thread 128 registers
  static constexpr int kHalf = Traits::kStateDim / kHalves, kRowLanes = kHalf / 4;

  struct Columns {
    float4 part[kHalves];
  };
  using State = Columns[kOwn];
  // The step's inputs, and where they lie.
  struct Inputs {
    const uint2 *keyAt, *queryAt;
    const float *logAt, *betaAt;
    const uint16_t* valueAt;
    uint2 key[kHalves], query[kHalves];
    float log, beta;
    uint16_t value;  // of the row whose sums the lane receives
  };
  struct Records {
    float log[2], factor[2];  // one warp has them: log-decays and key factors of records `lane` and `lane + 32`
  };

  __device__ int column() const { return lane % kRowLanes * 4; }
  __device__ float* place() const { return this->state() + lane / kRowLanes * kOwn * Traits::kStateDim + column(); }

  __device__ void loadState(State& s) const {
    const float* at = place();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int i = 0; i < kHalves; ++i) s[r].part[i] = loadOnce(at + r * Traits::kStateDim + i * kHalf);
    }
  }
  // The flush, once the records are folded: stored before the inputs are asked for, which takes less long.
  __device__ void flush(const State& s) const {
    if (!this->flushes()) return;
    float* at = place();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        *reinterpret_cast<float4*>(at + r * Traits::kStateDim + i * kHalf) = s[r].part[i];
      }
    }
  }

  // An address that is in registers when the wait ends, where inputs are expected that early: a shuffle keeps the
  // compiler from doing its arithmetic only then. Its line is asked for, into the L2.
  template <bool kAhead, class T>
  __device__ const T* ready(const T* at) const {
    if constexpr (!kAhead) return at;
    const auto* same =
        reinterpret_cast<const T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(at), lane));
    prefetchLine(same);
    return same;
  }
  template <bool kAhead>
  __device__ Inputs expectInputs() const {
    Inputs in;
    in.keyAt = ready<kAhead>(this->vector(p.k) + lane % kRowLanes);
    in.queryAt = ready<kAhead>(this->vector(p.q) + lane % kRowLanes);
    in.logAt = ready<kAhead>(this->number(p.dt));
    in.betaAt = ready<kAhead>(this->number(p.beta));
    in.valueAt = ready<kAhead>(this->value());
    return in;
  }
  __device__ void loadInputs(Inputs& in) const {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      in.key[i] = loadGlobalInput(in.keyAt + i * kRowLanes);
      in.query[i] = loadGlobalInput(in.queryAt + i * kRowLanes);
    }
    in.log = loadGlobalInput(in.logAt);
    in.value = loadGlobalInput(in.valueAt);
    in.beta = loadGlobalInput(in.betaAt);
  }

  __device__ bool folds() const { return pending() > 0 && (Traits::kFolds || this->flushes()); }
  __device__ bool weighs() const { return !Traits::kFolds && pending() > 0 && !this->flushes(); }

  // Starts the loads of the committed records.
  __device__ void startRecords(const Inputs&, Records& records) const {
    const auto load = [&](int half) {
      const int i = lane + 32 * half;
      records.log[half] = records.factor[half] = 0.0f;
      if (i >= pending() || !leads()) return;
      records.log[half] = __ldcg(this->ringNumbers() + this->ringRow(i));
      records.factor[half] = __ldcg(this->ringFactors() + this->ringRow(i));
    };
    load(0);
    load(1);
    loadKeys();
    this->loadValues();
  }
  // Weights of the committed records; where these are folded, into the state.
  __device__ void prepare(State& s, const Records& records) const {
    if (leads()) weighRecords(records);
    loadsDrain();
    __syncthreads();
    if (!folds()) return;
    weighValues();
    fold(s);
  }

  // What each record weighs, and behind the last one how much of the state is left; by one warp.
  __device__ bool leads() const { return this->warp == 0; }
  __device__ void weighRecords(const Records& records) const {
    Decay decay{{records.factor[0], records.factor[1]}};
    decay.sumUp(records.log, pending(), 1, lane);
    if (lane < pending()) weight(lane) = decay.weight[0];
    if (lane + 32 < pending()) weight(lane + 32) = decay.weight[1];
    if (lane == 0) weight(pending()) = expf(decay.total);
  }

  // The corrections of a record times its weight, of the warp's rows.
  __device__ float* weighed(int record) const {
    float* const all = reinterpret_cast<float*>(shared + layout.weighedOffset);
    return all + (this->warp * p.window + record) * Traits::kWarpRows;
  }
  __device__ void weighValues() const {
    const char* values = shared + layout.valueOffset + this->warp * Traits::kWarpRows * 2;
    for (int i = lane; i < 2 * pending(); i += 32) {
      const int record = i / 2, first = i % 2 * kOwn;
      const float factor = weight(record);
      float u[kOwn];
      unpack<__half>(*reinterpret_cast<const Packed<kOwn>*>(values + record * Traits::kPitch + first * 2), u);
#pragma unroll
      for (int r = 0; r < kOwn; r += 4) {
        *reinterpret_cast<float4*>(weighed(record) + first + r) =
            make_float4(factor * u[r], factor * u[r + 1], factor * u[r + 2], factor * u[r + 3]);
      }
    }
    __syncwarp();
  }

  // Starts the copies of the committed keys.
  __device__ void loadKeys() const {
    constexpr int kPieces = Traits::kStateDim / 8;
    const Act* ring = this->ringKeys();
#pragma unroll 1
    for (int i = threadIdx.x; i < pending() * kPieces; i += Traits::kThreads) {
      const Act* row = ring + this->ringRow(i / kPieces) * Traits::kStateDim;
      pieceLoad(sharedAddress(shared) + i * 16, row + i % kPieces * 8);
    }
  }

  static __device__ Columns columns(const uint2 (&packed)[kHalves]) {
    return {{unpack<Act>(packed[0]), unpack<Act>(packed[1])}};
  }
  static __device__ float product(const Columns& x, const Columns& y) {
    return dot(x.part[0], y.part[0]) + dot(x.part[1], y.part[1]);
  }

  __device__ Columns ringKey(int record) const {
    const char* row = shared + record * Traits::kStateDim * 2 + column() * 2;
    const uint2 packed[kHalves] = {*reinterpret_cast<const uint2*>(row),
                                   *reinterpret_cast<const uint2*>(row + kHalf * 2)};
    return columns(packed);
  }

  // s = what is left of s + sum of weight correction key over the records, in float32.
  __device__ void fold(State& s) const {
    const float left = weight(pending());
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        const float4 x = s[r].part[i];
        s[r].part[i] = make_float4(x.x * left, x.y * left, x.z * left, x.w * left);
      }
    }
    const float* correction = weighed(0) + lane / kRowLanes * kOwn;
#pragma unroll kOwn > 4 ? 2 : 4
    for (int i = 0; i < pending(); ++i) {
      const Columns k = ringKey(i);
#pragma unroll
      for (int r = 0; r < kOwn; r += 4) {
        const float4 u = *reinterpret_cast<const float4*>(correction + i * Traits::kWarpRows + r);
        const float four[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) addScaled(s[r + e].part[half], 1.0f, four[e], k.part[half]);
        }
      }
    }
  }

  // Where records are not folded: their keys times the step's key and query, times what they weigh, a pair a record. A
  // half-warp takes two records at a time.
  __device__ float* pairs() const { return reinterpret_cast<float*>(shared + layout.weighedOffset); }
  __device__ void weighVectors(const Columns& k, const Columns& q) const {
    const int mine = lane / kRowLanes * 2;
    for (int first = this->warp * 4; first < pending(); first += 4 * Traits::kWarps) {
      float sums[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Columns key = ringKey(min(first + mine + e, pending() - 1));
        sums[2 * e] = product(key, k);
        sums[2 * e + 1] = product(key, q);
      }
      const float sum = laneSum<4>(dealRows<4, kRowLanes / 2>(sums, lane));
      const int record = first + mine + lane / 8 % 2;
      if (lane % 4 == 0 && record < pending()) pairs()[2 * record + lane / 4 % 2] = weight(record) * sum;
    }
  }
  // What the state and the records recall, the lane's part of it.
  __device__ void addRecords(float& recalled, float& read) const {
    const float left = weight(pending());
    recalled *= left;
    read *= left;
    const char* value =
        shared + layout.valueOffset + (this->warp * Traits::kWarpRows + lane / Traits::kLanesPerRow) * 2;
#pragma unroll 4
    for (int i = lane % Traits::kLanesPerRow; i < pending(); i += Traits::kLanesPerRow) {
      const float u = __half2float(*reinterpret_cast<const __half*>(value + i * Traits::kPitch));
      const float2 pair = *reinterpret_cast<const float2*>(pairs() + 2 * i);
      recalled = fmaf(pair.x, u, recalled);
      read = fmaf(pair.y, u, read);
    }
  }

  // Products of the rows with a vector, of the lane's row: the lane's part of it.
  __device__ float rowProduct(const State& s, const Columns& vector) const {
    float sums[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) sums[r] = product(s[r], vector);
    return dealRows<kOwn, kRowLanes / 2>(sums, lane);
  }

  // `release` lets the next launch begin.
  template <class Release>
  __device__ void finish(State& s, const Inputs& in, const Records&, const Release& release) const {
    const Columns k = columns(in.key), q = columns(in.query);
    release();
    if (weighs()) weighVectors(k, q);
    float recalled = rowProduct(s, k), read = rowProduct(s, q);
    if (weighs()) {
      __syncthreads();
      addRecords(recalled, read);
    }
    recalled = laneSum<Traits::kLanesPerRow>(recalled);
    read = laneSum<Traits::kLanesPerRow>(read);
    const float keyScale = rsqrtf(laneSum<kRowLanes>(product(k, k)) + kNormEps);
    const float queryScale = rsqrtf((laneSum<kRowLanes>(product(q, q)) + kNormEps) * Traits::kStateDim);
    const float coupling = laneSum<kRowLanes>(product(k, q)) * keyScale * queryScale;
    const float decay = expf(in.log);
    const float exact = in.beta * (Activation<Act>::toFloat(in.value) - recalled * (decay * keyScale));
    const __half correction = roundedCorrection(exact);
    this->writeOutput(fmaf(coupling, __half2float(correction), read * (decay * queryScale)));
    this->appendValue(__half_as_ushort(correction));
    this->appendNumber(in.log);
    if (this->appendsKey()) {
      if (lane < kRowLanes) {
#pragma unroll
        for (int i = 0; i < kHalves; ++i) this->newKey()[lane + i * kRowLanes] = in.key[i];
      }
      if (lane == 0) this->ringFactors()[this->ringRow(pending())] = keyScale;
    }
  }
};

}  // namespace replayssm::plain
