// extern "C" face of the sum over ranks: validate, flatten, launch.
#include "replayssm/sum_ranks.h"

#include "abi/call.h"
#include "abi/check.h"
#include "abi/views.h"
#include "kernels/sum_ranks/params.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxChannels = kMaxSumThreads * kSumVector;

void checkInboxes(Checker& check, const rssm_sum_ranks_args& a) {
  check.range("ranks", a.ranks, 2, RSSM_MAX_RANKS);
  check.range("rank", a.rank, 0, a.ranks - 1);
  check.range("patience_ns", a.patience_ns, 1, INT64_MAX);
  if (check.ok() && a.gave_up == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "gave_up", "expected a pointer, got null");
  }
  for (int32_t rank = 0; check.ok() && rank < a.ranks; ++rank) {
    const void* inbox = a.inbox[rank];
    if (inbox == nullptr || reinterpret_cast<uintptr_t>(inbox) % kBulkAlignment != 0) {
      check.fail(RSSM_INVALID_ARGUMENT, "inbox", "expected addresses that are multiples of %d bytes, got %p of rank %d",
                 kBulkAlignment, inbox, rank);
    }
  }
}

// [rows, size] of the activation type, in pieces of 16 bytes.
void checkRows(Checker& check, const char* name, const rssm_tensor& t, int32_t act, int64_t rows, int64_t size) {
  check.tensor(name, t, act, {rows, size});
  check.contiguous(name, t, 1);
  check.aligned(name, t);
}

void checkArgs(Checker& check, const rssm_sum_ranks_args& a) {
  const int32_t act = activationType(a.x);
  checkInboxes(check, a);
  checkRows(check, "x", a.x, act, kAny, kAny);
  if (!check.ok()) return;
  const int64_t rows = a.x.shape[0], size = a.x.shape[1];
  check.range("x: R", rows, 0, a.capacity);
  check.range("x: D", size, kSumVector, kMaxChannels);
  if (check.ok() && size % kSumVector != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "x: D", "expected a multiple of %d, got %lld", kSumVector,
               static_cast<long long>(size));
  }
  if (!isAbsent(a.residual)) checkRows(check, "residual", a.residual, act, rows, size);
  checkRows(check, "sum", a.sum, act, rows, size);
  if (isAbsent(a.weight) != isAbsent(a.out) && check.ok()) {
    check.fail(RSSM_INVALID_ARGUMENT, "out", "expected a tensor with weight, null without, got the other");
  }
  if (!isAbsent(a.weight)) {
    check.tensor("weight", a.weight, RSSM_FLOAT32, {size});
    check.contiguous("weight", a.weight, 0);
    check.aligned("weight", a.weight);
    checkRows(check, "out", a.out, act, rows, size);
  }
  check.tensor("turn", a.turn, RSSM_INT32, {a.capacity});
  check.contiguous("turn", a.turn, 0);
  if (check.ok() && !(a.eps >= 0.0f)) {
    check.fail(RSSM_INVALID_ARGUMENT, "eps", "expected a number >= 0, got %g", static_cast<double>(a.eps));
  }
}

SumRanksParams flatten(const rssm_sum_ranks_args& a) {
  SumRanksParams p{};
  p.rows = static_cast<int32_t>(a.x.shape[0]);
  p.size = static_cast<int32_t>(a.x.shape[1]);
  p.capacity = a.capacity;
  p.rank = a.rank;
  p.ranks = a.ranks;
  p.eps = a.eps;
  p.weightOffset = a.weight_offset;
  p.float16 = a.x.dtype == RSSM_FLOAT16;
  p.programmaticLaunch = (a.flags & RSSM_SUM_RANKS_PROGRAMMATIC_LAUNCH) != 0;
  p.patience = static_cast<uint64_t>(a.patience_ns);
  for (int32_t rank = 0; rank < a.ranks; ++rank) p.inbox[rank] = a.inbox[rank];
  p.x = a.x.data;
  p.residual = a.residual.data;
  p.weight = static_cast<const float*>(a.weight.data);
  p.turn = static_cast<uint32_t*>(a.turn.data);
  p.gaveUp = reinterpret_cast<uint32_t*>(a.gave_up);
  p.sum = a.sum.data;
  p.out = a.out.data;
  p.xStride = a.x.stride[0];
  p.sumStride = a.sum.stride[0];
  if (p.residual != nullptr) p.residualStride = a.residual.stride[0];
  if (p.out != nullptr) p.outStride = a.out.stride[0];
  return p;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_sum_ranks(const rssm_sum_ranks_args* args, void* stream, rssm_error* error) {
  using namespace replayssm;
  return checkedCall("rssm_sum_ranks", args, stream, error, checkArgs, [](const rssm_sum_ranks_args& a, cudaStream_t on) {
    return a.x.shape[0] == 0 ? cudaSuccess : launchSumRanks(flatten(a), on);
  });
}
