"""The ctypes mirror has the sizes and offsets of the C headers, and each header compiles alone as C and as C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.launches import UpdateKernel
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi.entry_points import _error

INCLUDE = Path(__file__).resolve().parents[2] / "plugins" / "include"
HEADERS = sorted(path.name for path in (INCLUDE / "replayssm").glob("*.h"))
STRUCTS = {
    "rssm_error": _abi.ErrorRecord,
    "rssm_tensor": _abi.Tensor,
    "rssm_update_launch": _abi.LaunchConstants,
    "rssm_update_plan": _abi.LaunchRecord,
    "rssm_update_args": _abi.UpdateArgs,
    "rssm_decay_skip_args": _abi.DecaySkipArgs,
    "rssm_commit_args": _abi.CommitArgs,
    "rssm_prefill_args": _abi.PrefillArgs,
    "rssm_prefill_commit_args": _abi.PrefillCommitArgs,
    "rssm_conventional_args": _abi.ConventionalArgs,
    "rssm_conventional_commit_args": _abi.ConventionalCommitArgs,
    "rssm_recovery_args": _abi.RecoveryArgs,
    "rssm_conv1d_args": _abi.Conv1dArgs,
    "rssm_ssm_inputs_args": _abi.SsmInputsArgs,
    "rssm_gated_rms_norm_args": _abi.GatedRmsNormArgs,
    "rssm_rms_norm_args": _abi.RmsNormArgs,
    "rssm_sum_ranks_args": _abi.SumRanksArgs,
    "rssm_activation_args": _abi.ActivationArgs,
    "rssm_attention_inputs_args": _abi.AttentionInputsArgs,
    "rssm_attention_args": _abi.AttentionArgs,
    "rssm_draw_args": _abi.DrawArgs,
    "rssm_prompt_lookup_args": _abi.PromptLookupArgs,
    "rssm_step_inputs_args": _abi.StepInputsArgs,
    "rssm_step_outcome_args": _abi.StepOutcomeArgs,
    "rssm_packed_weights": _abi.PackedWeights,
    "rssm_experts_args": _abi.ExpertsArgs,
    "rssm_packed_linear_args": _abi.PackedLinearArgs,
    "rssm_route_args": _abi.RouteArgs,
    "rssm_reset_slots_args": _abi.ResetSlotsArgs,
    "rssm_clear_state_args": _abi.ClearStateArgs,
    "rssm_state_export_args": _abi.StateExportArgs,
    "rssm_state_import_args": _abi.StateImportArgs,
}
CONSTANTS = {
    "RSSM_ABI_VERSION": _abi.ABI_VERSION,
    "RSSM_MAX_RANK": _abi.MAX_RANK,
    "RSSM_ERROR_CHARS": _abi.ERROR_CHARS,
    "RSSM_UPDATE_PROGRAMMATIC_LAUNCH": _abi.UPDATE_PROGRAMMATIC_LAUNCH,
    "RSSM_UPDATE_SETTLED_STATE": _abi.UPDATE_SETTLED_STATE,
    **{f"RSSM_UPDATE_{kernel.name}": int(kernel) for kernel in UpdateKernel},
    "RSSM_CONVENTIONAL_PROGRAMMATIC_LAUNCH": _abi.CONVENTIONAL_PROGRAMMATIC_LAUNCH,
    "RSSM_CONVENTIONAL_SETTLED_STATE": _abi.CONVENTIONAL_SETTLED_STATE,
    "RSSM_CONV1D_PROGRAMMATIC_LAUNCH": _abi.CONV1D_PROGRAMMATIC_LAUNCH,
    "RSSM_NORM_PROGRAMMATIC_LAUNCH": _abi.NORM_PROGRAMMATIC_LAUNCH,
    "RSSM_ELEMENTWISE_PROGRAMMATIC_LAUNCH": _abi.ELEMENTWISE_PROGRAMMATIC_LAUNCH,
    "RSSM_SUM_RANKS_PROGRAMMATIC_LAUNCH": _abi.SUM_RANKS_PROGRAMMATIC_LAUNCH,
    "RSSM_MAX_RANKS": _abi.MAX_RANKS,
    "RSSM_ATTENTION_PROGRAMMATIC_LAUNCH": _abi.ATTENTION_PROGRAMMATIC_LAUNCH,
    **{f"RSSM_{function.name}": int(function) for function in _abi.Function},
    "RSSM_EXPERTS_PROGRAMMATIC_LAUNCH": _abi.EXPERTS_PROGRAMMATIC_LAUNCH,
    "RSSM_ROUTE_PROGRAMMATIC_LAUNCH": _abi.ROUTE_PROGRAMMATIC_LAUNCH,
    **{f"RSSM_ROUTER_{kind.name}": int(kind) for kind in _abi.RouterKind},
    **{f"RSSM_PREFILL_{flag.name}": int(flag) for flag in _abi.PrefillFlag},
    **{f"RSSM_{kind.name}": int(kind) for kind in _abi.Kind},
    **{f"RSSM_{dtype.name if dtype else 'NO_DTYPE'}": int(dtype) for dtype in _abi.Dtype},
    **{f"RSSM_{status.name}": int(status) for status in _abi.Status},
}

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("g++") is None, reason="no gcc and g++")


def fields_of(struct: type[ctypes.Structure]) -> list[str]:
    """The names of a struct's fields, its bases' first."""
    return [field[0] for base in reversed(struct.__mro__) for field in vars(base).get("_fields_", ())]


def expected_lines() -> list[str]:
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f"{name} {ctypes.sizeof(struct)}")
        lines += [f"{name}.{field} {getattr(struct, field).offset}" for field in fields_of(struct)]
    return lines + [f"{name} {value}" for name, value in CONSTANTS.items()]


def program() -> str:
    lines = [f'#include "replayssm/{header}"' for header in HEADERS]
    lines += ["#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for name, struct in STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'  printf("{name}.{f} %zu\\n", offsetof({name}, {f}));' for f in fields_of(struct)]
    lines += [f'  printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    return "\n".join([*lines, "  return 0;", "}", ""])


@needs_gcc
def test_mirror_has_the_sizes_offsets_and_constants_of_the_headers(tmp_path: Path) -> None:
    source, binary = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(program())
    subprocess.run(["gcc", "-std=c11", f"-I{INCLUDE}", str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == expected_lines()


@needs_gcc
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(("compiler", "flags"), [("gcc", ["-xc", "-std=c11"]), ("g++", ["-xc++", "-std=c++17"])])
def test_each_header_compiles_alone(header: str, compiler: str, flags: list[str]) -> None:
    command = [compiler, *flags, "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{INCLUDE}", "-fsyntax-only", "-"]
    subprocess.run(command, input=f'#include "replayssm/{header}"\n', text=True, check=True)


def test_native_messages_become_the_packages_errors() -> None:
    error = _error(_abi.Status.INVALID_ARGUMENT, "rssm_update", "rssm_update: k: expected [2, 3], got [2, 4]")
    assert isinstance(error, ContractError)
    assert (error.operation, error.argument, error.expected, error.got) == ("rssm_update", "k", "[2, 3]", "[2, 4]")


def test_tensor_views_carry_shape_and_strides_in_elements() -> None:
    view = _abi.tensor(4096, _abi.Dtype.INT32, (3, 5), (10, 2))
    assert (view.data, view.dtype, view.rank) == (4096, int(_abi.Dtype.INT32), 2)
    assert list(view.shape)[:2] == [3, 5] and list(view.stride)[:2] == [10, 2]
    with pytest.raises(ContractError):
        _abi.tensor(0, _abi.Dtype.INT32, (1,) * 5, (1,) * 5)
