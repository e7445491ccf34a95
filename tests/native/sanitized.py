"""The reduced case list for compute-sanitizer: every kernel once with a flush, small shapes, results compared as usual.

    compute-sanitizer --tool memcheck --kernel-regex kns=replayssm --error-exitcode 9 python -m tests.native.sanitized

Tools: memcheck, racecheck, synccheck; initcheck without the regular expression, as it must see torch's writes. Names of
test modules as arguments choose among the list. The exit status is pytest's, 9 where the tool found something.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = (
    "test_update.py::test_random_steps_match_the_specification[mamba2-64-1-8-direct]",
    "test_update.py::test_random_steps_match_the_specification[mamba2-64-1-8-streamed]",
    "test_update.py::test_random_steps_match_the_specification[mamba2-64-4-8-direct]",
    "test_update.py::test_random_steps_match_the_specification[mamba2-64-4-8-streamed]",
    "test_update.py::test_random_steps_match_the_specification[gdn-128-1-8-direct]",
    "test_update.py::test_random_steps_match_the_specification[gdn-128-1-8-streamed]",
    "test_update.py::test_random_steps_match_the_specification[gdn-128-4-8-direct]",
    "test_update.py::test_random_steps_match_the_specification[gdn-128-4-8-streamed]",
    "test_narrow_update.py::test_three_windows_of_plain_decoding[float32-nvfp4]",
    "test_narrow_update.py::test_three_windows_of_plain_decoding[float16-shared]",
    "test_narrow_update.py::test_three_windows_of_plain_decoding[fp8-shared]",
    "test_narrow_gdn.py::test_verification_matches_the_reference_in_any_window[float32-nvfp4-4-4]",
    "test_narrow_gdn.py::test_verification_matches_the_reference_in_any_window[float16-shared-4-4]",
    "test_prefill.py::test_pending_records_are_folded_first[mamba2-64-16]",
    "test_prefill.py::test_chunks_of_a_prompt_keep_a_float32_carry[mamba2-80]",
    "test_prefill.py::test_chunks_of_a_prompt_keep_a_float32_carry[gdn-128]",
    "test_prefill_formats.py::test_a_carried_chunk_ends_in_the_copies",
    "test_conventional.py::test_plain_step_in_place_matches_the_recurrence[mamba2-80-bfloat16-B9]",
    "test_conventional.py::test_a_verification_leaves_a_state_after_each_token[mamba2-80-3-0]",
    "test_ssm_inputs.py::test_the_convolution_has_the_bits_of_the_one_alone[5-GDN]",
    "test_gated_norm.py::test_a_token_has_the_same_bits_in_any_batch_and_launch",
    "test_state_io.py::test_all_decay_gone_stays_finite",
    "test_slots.py::test_cursors_of_the_given_slots_are_as_new[True]",
)


def main(modules: list[str]) -> int:
    """Runs the chosen cases in this process; pytest's exit status."""
    chosen = [case for case in CASES if not modules or case.partition(".")[0] in modules]
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(str(HERE / case) for case in chosen)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
