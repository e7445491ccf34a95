// Boundary checks of the C ABI: each failure becomes one sentence (operation, argument, expected, got) in the caller's
// record. Named dimensions are matched by passing the size every occurrence must have.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "replayssm/status.h"
#include "replayssm/tensor.h"

namespace replayssm {

constexpr int64_t kAny = -1;       // matches every size or stride
constexpr int kBulkAlignment = 16;  // bytes; what the bulk copy engine needs of addresses and row strides

inline const char* dtypeName(int32_t dtype) {
  switch (dtype) {
    case RSSM_FLOAT32: return "float32";
    case RSSM_FLOAT16: return "float16";
    case RSSM_BFLOAT16: return "bfloat16";
    case RSSM_FLOAT8_E4M3: return "float8_e4m3";
    case RSSM_FLOAT4_E2M1: return "float4_e2m1";
    case RSSM_INT32: return "int32";
    case RSSM_INT64: return "int64";
    default: return "no dtype";
  }
}

inline int dtypeBytes(int32_t dtype) {
  switch (dtype) {
    case RSSM_INT64: return 8;
    case RSSM_FLOAT32:
    case RSSM_INT32: return 4;
    case RSSM_FLOAT16:
    case RSSM_BFLOAT16: return 2;
    default: return 1;
  }
}

class Checker {
 public:
  Checker(const char* operation, rssm_error* error) : operation_(operation), error_(error) {}

  rssm_status status() const { return status_; }
  bool ok() const { return status_ == RSSM_OK; }

  // Records the first failure only.
  __attribute__((format(printf, 4, 5))) bool fail(rssm_status status, const char* argument, const char* format, ...) {
    if (!ok()) return false;
    status_ = status;
    if (error_ == nullptr) return false;
    error_->status = status;
    int used = std::snprintf(error_->message, RSSM_ERROR_CHARS, "%s: %s: ", operation_, argument);
    if (used < 0 || used >= RSSM_ERROR_CHARS) return false;
    va_list values;
    va_start(values, format);
    std::vsnprintf(error_->message + used, static_cast<size_t>(RSSM_ERROR_CHARS - used), format, values);
    va_end(values);
    return false;
  }

  bool header(uint32_t structSize, uint32_t expectedSize, uint32_t version) {
    if (structSize != expectedSize) {
      return fail(RSSM_ABI_MISMATCH, "struct_size", "expected %u, got %u; rebuild against this library's headers",
                  expectedSize, structSize);
    }
    if (version != RSSM_ABI_VERSION) {
      return fail(RSSM_ABI_MISMATCH, "abi_version", "expected %u, got %u", RSSM_ABI_VERSION, version);
    }
    return true;
  }

  bool range(const char* argument, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return true;
    return fail(RSSM_INVALID_ARGUMENT, argument, "expected %lld..%lld, got %lld", static_cast<long long>(low),
                static_cast<long long>(high), static_cast<long long>(value));
  }

  // dtype, shape, presence, whole elements; sizes are at least 0. Zero-size tensors may have a null pointer.
  bool tensor(const char* argument, const rssm_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape) {
    if (!ok()) return false;
    int rank = static_cast<int>(shape.size());
    if (t.rank != rank) return fail(RSSM_INVALID_ARGUMENT, argument, "expected rank %d, got %d", rank, t.rank);
    if (t.dtype != dtype) {
      return fail(RSSM_INVALID_ARGUMENT, argument, "expected %s, got %s", dtypeName(dtype), dtypeName(t.dtype));
    }
    int64_t elements = 1;
    int axis = 0;
    for (int64_t expected : shape) {
      const int64_t size = t.shape[axis];  // a size of -1 is not kAny: it would match every other one later
      if (size < 0 || (expected != kAny && size != expected)) return shapeFailure(argument, t, shape);
      elements *= size;
      ++axis;
    }
    if (elements != 0 && t.data == nullptr) {
      return fail(RSSM_INVALID_ARGUMENT, argument, "expected a pointer, got null");
    }
    return elements == 0 || address(argument, t.data, dtypeBytes(dtype));
  }

  // Axes from `first` on are contiguous, row major.
  bool contiguous(const char* argument, const rssm_tensor& t, int first) {
    if (!ok()) return false;
    for (int axis = 0; axis < t.rank; ++axis) {
      if (t.shape[axis] == 0) return true;
    }
    int64_t expected = 1;
    for (int axis = t.rank - 1; axis >= first; --axis) {
      if (t.shape[axis] != 1 && t.stride[axis] != expected) {
        return fail(RSSM_INVALID_ARGUMENT, argument, "expected stride %lld on axis %d, got %lld",
                    static_cast<long long>(expected), axis, static_cast<long long>(t.stride[axis]));
      }
      expected *= t.shape[axis];
    }
    return true;
  }

  // Pointer and every stride but the last are multiples of 16 bytes.
  bool aligned(const char* argument, const rssm_tensor& t) {
    if (!ok()) return false;
    if (!address(argument, t.data, kBulkAlignment)) return false;
    for (int axis = 0; axis + 1 < t.rank; ++axis) {
      if (t.shape[axis] > 1 && t.stride[axis] * dtypeBytes(t.dtype) % kBulkAlignment != 0) {
        return fail(RSSM_INVALID_ARGUMENT, argument,
                    "expected a stride of whole %d bytes on axis %d, got %lld elements",
                    kBulkAlignment, axis, static_cast<long long>(t.stride[axis]));
      }
    }
    return true;
  }

 private:
  bool address(const char* argument, const void* data, int bytes) {
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0) return true;
    return fail(RSSM_INVALID_ARGUMENT, argument, "expected an address that is a multiple of %d bytes, got %p", bytes, data);
  }

  bool shapeFailure(const char* argument, const rssm_tensor& t, std::initializer_list<int64_t> shape) {
    char expected[96] = "", got[96] = "";
    int axis = 0, usedExpected = 0, usedGot = 0;
    for (int64_t size : shape) {
      const char* comma = axis == 0 ? "" : ", ";
      if (size == kAny) {
        usedExpected += std::snprintf(expected + usedExpected, sizeof(expected) - usedExpected, "%sany", comma);
      } else {
        usedExpected += std::snprintf(expected + usedExpected, sizeof(expected) - usedExpected, "%s%lld", comma,
                                      static_cast<long long>(size));
      }
      usedGot += std::snprintf(got + usedGot, sizeof(got) - usedGot, "%s%lld", comma,
                               static_cast<long long>(t.shape[axis++]));
    }
    return fail(RSSM_INVALID_ARGUMENT, argument, "expected [%s], got [%s]", expected, got);
  }

  const char* operation_;
  rssm_error* error_;
  rssm_status status_ = RSSM_OK;
};

}  // namespace replayssm
