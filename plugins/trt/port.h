// A plugin's inputs and outputs as a table: the only place that knows which tensor stands where, and of which type.
//
// Inputs are the ports in order. Outputs are the plugin's own (dense) ones first, then one for every port that is updated
// in place, in order; such an output aliases its input and must be bound to the same address.
#pragma once

#include <cstdint>

#include "NvInferRuntime.h"
#include "replayssm/tensor.h"

namespace replayssm::trt {

template <class Args>
struct Port {
  const char* name;         // the argument's name in the C ABI
  rssm_tensor Args::*view;  // null: orders the plugin behind that tensor's producer and is not read
  int32_t dtype;            // RSSM_*; RSSM_NO_DTYPE: any type
  int32_t rank;             // -1: any rank
  bool inPlace;
};

// How a tensor of an ABI type travels through a network: bytes of the 8- and 4-bit types as int8, since neither is a
// legal network input on every flavour.
inline nvinfer1::DataType networkType(int32_t dtype) {
  switch (dtype) {
    case RSSM_FLOAT16: return nvinfer1::DataType::kHALF;
    case RSSM_BFLOAT16: return nvinfer1::DataType::kBF16;
    case RSSM_FLOAT8_E4M3:
    case RSSM_FLOAT4_E2M1: return nvinfer1::DataType::kINT8;
    case RSSM_INT32: return nvinfer1::DataType::kINT32;
    case RSSM_INT64: return nvinfer1::DataType::kINT64;
    default: return nvinfer1::DataType::kFLOAT;
  }
}

// A dense row-major view; packed types count elements in the ABI and bytes in the network.
inline rssm_tensor denseView(const nvinfer1::Dims& dims, int32_t dtype, const void* data) {
  rssm_tensor view{};
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = dims.nbDims;
  int64_t stride = 1;
  for (int32_t axis = dims.nbDims - 1; axis >= 0; --axis) {
    bool packed = dtype == RSSM_FLOAT4_E2M1 && axis == dims.nbDims - 1;
    view.shape[axis] = dims.d[axis] * (packed ? 2 : 1);
    view.stride[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}

}  // namespace replayssm::trt
