// Matrices of 16-bit elements out of shared memory, turned around on the way: a thin name for PTX.
#pragma once

#include <cstdint>

namespace replayssm {

// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8 and gets, of matrix i in part[i], column l / 4 of
// rows 2 (l % 4) and the next one. Rows are 16-byte aligned.
__device__ __forceinline__ void loadTransposed(uint32_t (&part)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace replayssm
