// Shared-memory barriers, asynchronous copies and programmatic launch control: thin names for PTX of sm_90 and later.
// Addresses are 32-bit shared-window addresses (see sharedAddress). No policy lives here.
#pragma once

#include <cstdint>

#include "programmatic.cuh"

namespace replayssm {

__device__ __forceinline__ uint32_t sharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Before the barrier is initialised anew; nothing may be under way to it.
__device__ __forceinline__ void barrierInvalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes barrier initialisation visible to the asynchronous proxy; a __syncthreads must follow.
__device__ __forceinline__ void barrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Several arrivals at once.
__device__ __forceinline__ void barrierArriveTimes(uint32_t barrier, uint32_t times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

// Announces bytes without arriving.
__device__ __forceinline__ void barrierExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void barrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Global -> shared by the bulk engine; 16-byte aligned addresses and sizes; completes on `barrier`.
__device__ __forceinline__ void bulkLoad(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same for what is not read again soon: it may leave the L2 before anything else.
__device__ __forceinline__ void bulkLoadOnce(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
      "}\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for what will be written again soon: its lines should still be in the L2 then.
__device__ __forceinline__ void bulkLoadAgain(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
      "}\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Global -> L2, hints: 16-byte aligned address and size; the line at an address.
__device__ __forceinline__ void bulkPrefetch(const void* source, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void prefetchLine(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Shared -> global by the bulk engine; the caller commits the group and waits before it reuses the source.
__device__ __forceinline__ void bulkStore(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all committed stores have read their source.
__device__ __forceinline__ void bulkWaitRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until all committed stores are complete.
__device__ __forceinline__ void bulkWait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders ordinary shared-memory writes of this thread before later asynchronous reads of them.
__device__ __forceinline__ void asyncProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four bytes, global -> shared, asynchronous, not tied to alignment of more than four bytes.
__device__ __forceinline__ void wordLoad(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Sixteen bytes, global -> shared, asynchronous, past the L1; both addresses 16-byte aligned.
__device__ __forceinline__ void pieceLoad(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// The same with constant offsets.
template <int kTarget, int kSource>
__device__ __forceinline__ void pieceLoad(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(target), "l"(source), "n"(kTarget), "n"(kSource)
               : "memory");
}

// This thread's arrival on `barrier` happens when all its earlier word and piece loads have landed.
__device__ __forceinline__ void loadsArrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Groups of this thread's loads: close one; wait until only the newest open ones may be on their way.
__device__ __forceinline__ void loadsCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void loadsWaitFirst() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
}

// Until all word and piece loads of this thread have landed; a thread must not exit before.
__device__ __forceinline__ void loadsDrain() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace replayssm
