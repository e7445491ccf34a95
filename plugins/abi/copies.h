// The checkpoint copies of one layer as views: which dtypes and shapes a valid pair has.
#pragma once

#include "abi/check.h"

namespace replayssm {

struct CopyViews {
  const rssm_tensor& checkpoint;
  const rssm_tensor& checkpointScale;
  const rssm_tensor& read;
  const rssm_tensor& readScale;
  const rssm_tensor& readHeadScale;
};

constexpr int64_t kFp8Block = 128;
constexpr int64_t kFp4Block = 16;

inline bool isOneOf(int32_t dtype, std::initializer_list<int32_t> allowed) {
  for (int32_t candidate : allowed) {
    if (dtype == candidate) return true;
  }
  return false;
}

// All but the slot axis is contiguous.
inline void checkPoolTensor(Checker& check, const char* name, const rssm_tensor& t, int32_t dtype,
                            std::initializer_list<int64_t> shape) {
  check.tensor(name, t, dtype, shape);
  check.contiguous(name, t, 1);
}

// The high-precision checkpoint [slots, H, P, N], any H, P and N, and its scale.
inline void checkCheckpoint(Checker& check, const rssm_tensor& t, const rssm_tensor& scale, int64_t slots) {
  if (check.ok() && !isOneOf(t.dtype, {RSSM_FLOAT32, RSSM_FLOAT16, RSSM_FLOAT8_E4M3})) {
    check.fail(RSSM_INVALID_ARGUMENT, "checkpoint", "expected float32, float16 or float8_e4m3, got %s",
               dtypeName(t.dtype));
  }
  checkPoolTensor(check, "checkpoint", t, t.dtype, {slots, kAny, kAny, kAny});
  if (t.dtype == RSSM_FLOAT8_E4M3) {
    checkPoolTensor(check, "checkpoint_scale", scale, RSSM_FLOAT32,
                    {t.shape[0], t.shape[1], t.shape[2], (t.shape[3] + kFp8Block - 1) / kFp8Block});
  }
}

inline void checkCopies(Checker& check, const CopyViews& v, int64_t slots) {
  checkCheckpoint(check, v.checkpoint, v.checkpointScale, slots);
  if (!check.ok() || v.read.data == nullptr) return;
  const int64_t* s = v.checkpoint.shape;
  if (!isOneOf(v.read.dtype, {RSSM_FLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1})) {
    check.fail(RSSM_INVALID_ARGUMENT, "read", "expected float16, float8_e4m3 or float4_e2m1, got %s",
               dtypeName(v.read.dtype));
    return;
  }
  checkPoolTensor(check, "read", v.read, v.read.dtype, {s[0], s[1], s[2], s[3]});
  if (v.read.dtype == RSSM_FLOAT8_E4M3) {
    checkPoolTensor(check, "read_scale", v.readScale, RSSM_FLOAT32,
                    {s[0], s[1], s[2], (s[3] + kFp8Block - 1) / kFp8Block});
  } else if (v.read.dtype == RSSM_FLOAT4_E2M1) {
    if (s[3] % kFp4Block != 0) {
      check.fail(RSSM_UNSUPPORTED, "read: N", "expected a multiple of %lld for float4_e2m1, got %lld",
                 static_cast<long long>(kFp4Block), static_cast<long long>(s[3]));
    }
    checkPoolTensor(check, "read_scale", v.readScale, RSSM_FLOAT8_E4M3, {s[0], s[1], s[2], s[3] / kFp4Block});
    checkPoolTensor(check, "read_head_scale", v.readHeadScale, RSSM_FLOAT32, {s[0], s[1]});
  }
}

// Bytes of `elements` elements; two E2M1 elements share one.
inline int64_t elementBytes(int32_t dtype, int64_t elements) {
  return dtype == RSSM_FLOAT4_E2M1 ? elements / 2 : elements * dtypeBytes(dtype);
}

}  // namespace replayssm
