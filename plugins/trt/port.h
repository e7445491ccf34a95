// A plugin's inputs and outputs as a table: the only place that knows which tensor stands where, and of which type.
//
// Inputs are the ports in order. Outputs are the plugin's own (dense) ones first, then one for every port that is updated
// in place, in order; such an output aliases its input and must be bound to the same address.
//
// An activation port may name a range of the channels of a projection [B, T, C]: the operation reads it where it lies.
#pragma once

#include <cstdint>

#include "NvInferRuntime.h"
#include "replayssm/tensor.h"

namespace replayssm::trt {

// Channels [offset, offset + heads * width) of the last axis, seen as [B, T, heads, width]; width 0: [B, T, heads].
struct Channels {
  int32_t offset, heads, width;
  int64_t count() const { return int64_t{heads} * (width > 0 ? width : 1); }
};

template <class Args>
struct Port {
  const char* name;         // the argument's name in the C ABI
  rssm_tensor Args::*view;
  int32_t dtype;            // RSSM_*; RSSM_NO_DTYPE: any type
  int32_t rank;             // -1: any rank
  bool inPlace = false;
  Channels channels = {0, 0, 0};  // heads 0: the tensor as it is
  bool bytes = false;             // weights: travel as int8 whatever their type, a row's bytes in the last axis
};

// How a tensor of an ABI type travels through a network. Packed 4-bit types travel as bytes: they are no legal network
// input on every flavour.
inline nvinfer1::DataType networkType(int32_t dtype) {
  switch (dtype) {
    case RSSM_FLOAT16: return nvinfer1::DataType::kHALF;
    case RSSM_BFLOAT16: return nvinfer1::DataType::kBF16;
    case RSSM_FLOAT8_E4M3: return nvinfer1::DataType::kFP8;
    case RSSM_FLOAT4_E2M1: return nvinfer1::DataType::kINT8;
    case RSSM_INT32: return nvinfer1::DataType::kINT32;
    case RSSM_INT64: return nvinfer1::DataType::kINT64;
    default: return nvinfer1::DataType::kFLOAT;
  }
}

inline int64_t elementBytes(int32_t dtype) {
  switch (dtype) {
    case RSSM_INT64: return 8;
    case RSSM_FLOAT32:
    case RSSM_INT32: return 4;
    case RSSM_FLOAT16:
    case RSSM_BFLOAT16: return 2;
    default: return 1;
  }
}

// A dense row-major view; packed types, and others where they travel so, count bytes in the network and elements here.
inline rssm_tensor denseView(const nvinfer1::Dims& dims, int32_t dtype, const void* data, bool bytes = false) {
  rssm_tensor view{};
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = dims.nbDims < RSSM_MAX_RANK ? dims.nbDims : RSSM_MAX_RANK;
  int64_t stride = 1;
  for (int32_t axis = view.rank - 1; axis >= 0; --axis) {
    bool packed = dtype == RSSM_FLOAT4_E2M1 && axis == view.rank - 1;
    view.shape[axis] = dims.d[axis] * (packed ? 2 : 1);
    if (bytes && axis == view.rank - 1) view.shape[axis] /= elementBytes(dtype);
    view.stride[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}

// The channels of a dense [B, T, C].
inline rssm_tensor channelView(const nvinfer1::Dims& dims, int32_t dtype, const void* data, const Channels& channels) {
  rssm_tensor view{};
  view.data = const_cast<char*>(static_cast<const char*>(data)) + channels.offset * elementBytes(dtype);
  view.dtype = dtype;
  view.rank = channels.width == 0 ? 3 : 4;
  int64_t shape[] = {dims.d[0], dims.d[1], channels.heads, channels.width};
  int64_t stride[] = {dims.d[1] * dims.d[2], dims.d[2], channels.width == 0 ? 1 : channels.width, 1};
  for (int32_t axis = 0; axis < view.rank; ++axis) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = stride[axis];
  }
  return view;
}

// [B, T, C] as [B T, C]: rows follow one another at one stride.
inline rssm_tensor flatRows(const rssm_tensor& t) {
  rssm_tensor flat = t;
  flat.rank = 2;
  flat.shape[0] = t.shape[0] * t.shape[1];
  flat.stride[0] = t.stride[1];
  flat.shape[1] = t.shape[2];
  flat.stride[1] = t.stride[2];
  return flat;
}

}  // namespace replayssm::trt
