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

// On failure check.ok() is false and nothing else means anything.
UpdateProblem updateProblem(const rssm_update_args* args, Checker& check);

}  // namespace replayssm
