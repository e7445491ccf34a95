// The checked arguments of one step of the update, as its entry points share them.
#pragma once

#include "abi/check.h"
#include "kernels/replay_update/dispatch.h"
#include "replayssm/update.h"

namespace replayssm {

struct UpdateProblem {
  UpdateParams params;  // without the workspace
  ActivationType act;
  bool empty;  // nothing to launch: no rows or no tokens
};

// On failure check.ok() is false and nothing else means anything. multiprocessors: those of the current device are looked
// up where this is 0.
UpdateProblem updateProblem(const rssm_update_args* args, Checker& check, int32_t multiprocessors = 0);

struct UpdatePlan {
  UpdateParams params;   // without the workspace
  UpdateChoice choice;  // launcher is null when the step is empty
};

// Everything the entry points need to know, likewise.
UpdatePlan updatePlan(const rssm_update_args* args, Checker& check, int32_t multiprocessors = 0);

// The counters of the work queue are the workspace; false where it does not do.
bool useTickets(Checker& check, UpdateParams& p, void* workspace, size_t bytes);

}  // namespace replayssm
