// How a step of the update is launched: what a caller may ask for, the choice, and the choice in numbers and words.
#include <cstdio>

#include "abi/check.h"
#include "abi/update_params.h"
#include "abi/update_problem.h"

namespace replayssm {
namespace {

constexpr int kMostMultiprocessors = 1 << 16;
constexpr int32_t kMostPartHeads = 64;  // of any kernel of parts

LaunchWish launchWish(const rssm_update_launch& l) {
  return {static_cast<UpdateKernel>(l.kernel), l.multiprocessors, l.run_heads, l.piece_heads, l.drawn_rounds, l.stages};
}

const char* kernelName(UpdateKernel kernel) {
  switch (kernel) {
    case UpdateKernel::kPlain: return "plain";
    case UpdateKernel::kDirect: return "direct";
    case UpdateKernel::kStreamed: return "streamed";
    case UpdateKernel::kParts: return "parts";
    default: return "chosen";
  }
}

// Whether every number that is given is one that the kernel takes, and none is negative.
bool taken(const LaunchWish& wish) {
  const bool streamed = wish.names(UpdateKernel::kStreamed), parts = wish.names(UpdateKernel::kParts);
  const bool known = wish.kernel >= UpdateKernel::kAny && wish.kernel <= UpdateKernel::kParts;
  auto fits = [](int32_t number, bool serves) { return number == 0 || (serves && number > 0); };
  return known && fits(wish.multiprocessors, streamed) && fits(wish.runHeads, streamed) &&
         fits(wish.pieceHeads, streamed || parts) && fits(wish.drawnRounds, streamed) && fits(wish.stages, parts);
}

struct Search {
  UpdateFamily family;
  StateFormats formats;
  ActivationType act;
  const UpdateParams& p;

  UpdateChoice find(const LaunchWish& wish) const { return findUpdate(family, formats, act, p, wish); }
  bool serves(UpdateKernel kernel) const { return find({kernel, 0, 0, 0, 0, 0}).launcher != nullptr; }
};

// What may be asked of a step that some kernel serves, in words.
void describeAllowed(const Search& search, char* text, size_t bytes) {
  size_t used = 0;
  auto add = [&](const char* format, auto... values) {
    const int more = used < bytes ? std::snprintf(text + used, bytes - used, format, values...) : 0;
    if (more > 0) used += static_cast<size_t>(more);
  };
  const UpdateParams& p = search.p;
  add("%s", "0 (the library's choice)");
  if (search.serves(UpdateKernel::kPlain)) add(", kernel %d (plain)", RSSM_UPDATE_PLAIN);
  if (search.serves(UpdateKernel::kDirect)) add(", kernel %d (direct)", RSSM_UPDATE_DIRECT);
  if (search.serves(UpdateKernel::kStreamed)) {
    add(", kernel %d (streamed: multiprocessors 1..%d, run_heads and piece_heads divide %d and piece_heads run_heads, "
        "drawn_rounds 1..whole rounds)", RSSM_UPDATE_STREAMED, p.multiprocessors, p.headsPerGroup);
  }
  if (!search.serves(UpdateKernel::kParts)) return;
  add(", kernel %d (parts: piece_heads", RSSM_UPDATE_PARTS);
  for (int32_t heads = 1; heads <= kMostPartHeads; ++heads) {
    if (search.find({UpdateKernel::kParts, 0, 0, heads, 0, 0}).launcher != nullptr) add(" %d", heads);
  }
  add("%s", ", stages");
  for (int32_t stages = 1; stages <= 2; ++stages) {
    if (search.find({UpdateKernel::kParts, 0, 0, 0, 0, stages}).launcher != nullptr) add(" %d", stages);
  }
  add("%s", ")");
}

void refuse(Checker& check, const Search& search, const LaunchWish& wish) {
  char allowed[320];
  describeAllowed(search, allowed, sizeof(allowed));
  const char* numbers = wish.kernel == UpdateKernel::kAny ? "numbers only beside their kernel; " : "";
  check.fail(RSSM_INVALID_ARGUMENT, "launch",
             "expected %s%s, got kernel %d multiprocessors %d run_heads %d piece_heads %d drawn_rounds %d stages %d",
             numbers, allowed, static_cast<int>(wish.kernel), wish.multiprocessors, wish.runHeads, wish.pieceHeads,
             wish.drawnRounds, wish.stages);
}

// The plan on a device of that many; on failure check.ok() is false.
UpdatePlan planOn(const rssm_update_args* args, int32_t multiprocessors, Checker& check) {
  check.range("multiprocessors", multiprocessors, 1, kMostMultiprocessors);
  return check.ok() ? updatePlan(args, check, multiprocessors) : UpdatePlan{};
}

int singleHeads(const WorkDeal& deal) { return deal.pieceHeads > 1 ? deal.pieces - deal.large : 0; }

}  // namespace

UpdatePlan updatePlan(const rssm_update_args* args, Checker& check, int32_t multiprocessors) {
  const UpdateProblem problem = updateProblem(args, check, multiprocessors);
  UpdatePlan result{problem.params, {}};
  if (!check.ok() || problem.empty) return result;
  const rssm_update_args& a = *args;
  const UpdateParams& p = result.params;
  const UpdateFamily family = a.kind == RSSM_GDN ? UpdateFamily::kGdn : UpdateFamily::kMamba2;
  const Search search{family, stateFormats(a), problem.act, p};
  const LaunchWish wish = launchWish(a.launch);
  if (taken(wish)) result.choice = search.find(wish);
  if (result.choice.launcher != nullptr) return result;
  if (search.find({}).launcher != nullptr) {
    refuse(check, search, wish);
    return result;
  }
  check.fail(RSSM_UNSUPPORTED, "value, k, checkpoint, read",
             "no kernel for %s, d_v %d, d_k %d, T %d, %s states read as %s; built are:\n%s",
             dtypeName(a.value.dtype), p.headDim, p.stateDim, p.tokens, dtypeName(a.checkpoint.dtype),
             dtypeName(a.read.data != nullptr ? a.read.dtype : a.checkpoint.dtype), supportedUpdates());
  return result;
}

}  // namespace replayssm

rssm_status rssm_update_launch_plan(const rssm_update_args* args, int32_t multiprocessors, rssm_update_plan* plan,
                                    rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_update_launch_plan", error);
  const UpdateLaunch launch = planOn(args, multiprocessors, check).choice.launch;
  if (check.ok() && plan == nullptr) check.fail(RSSM_INVALID_ARGUMENT, "plan", "expected a pointer, got null");
  if (!check.ok()) return check.status();
  const WorkDeal& deal = launch.deal;
  const bool streamed = launch.kernel == UpdateKernel::kStreamed;
  *plan = {static_cast<int32_t>(launch.kernel), launch.grid, launch.threads, launch.sharedBytes, launch.stages,
           launch.workers, deal.rounds, deal.roundHeads, deal.pieces,
           streamed ? deal.pieceHeads : launch.partHeads, singleHeads(deal)};
  return check.status();
}

rssm_status rssm_update_launch_text(const rssm_update_args* args, int32_t multiprocessors, char* text,
                                    size_t text_bytes, rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_update_launch_text", error);
  const UpdateLaunch launch = planOn(args, multiprocessors, check).choice.launch;
  if (check.ok() && (text == nullptr || text_bytes == 0)) {
    check.fail(RSSM_INVALID_ARGUMENT, "text", "expected a buffer, got none");
  }
  if (!check.ok()) return check.status();
  if (launch.kernel == UpdateKernel::kAny) {
    std::snprintf(text, text_bytes, "nothing to launch");
    return check.status();
  }
  const int used = std::snprintf(text, text_bytes, "%s: %d CTAs of %d threads and %d bytes", kernelName(launch.kernel),
                                 launch.grid, launch.threads, launch.sharedBytes);
  if (used < 0 || static_cast<size_t>(used) >= text_bytes) return check.status();
  const size_t left = text_bytes - static_cast<size_t>(used);
  const WorkDeal& deal = launch.deal;
  if (launch.kernel == UpdateKernel::kStreamed) {
    std::snprintf(text + used, left,
                  ", %d stages, %d workers: %d rounds of %d heads, %d pieces of %d heads, %d of single heads",
                  launch.stages, launch.workers, deal.rounds, deal.roundHeads, deal.pieces - singleHeads(deal),
                  deal.pieceHeads, singleHeads(deal));
  } else if (launch.kernel == UpdateKernel::kParts) {
    std::snprintf(text + used, left, ", %d stages, %d heads each", launch.stages, launch.partHeads);
  }
  return check.status();
}
