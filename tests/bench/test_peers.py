"""Other projects' kernels beside ours: which cases they serve, and what becomes of them with and without a package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.native import harness
from trtllm_replayssm.bench import peers
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_cases
from trtllm_replayssm.bench.peer import Batches, Peer, Step
from trtllm_replayssm.bench.peers import PEERS, run_peers
from trtllm_replayssm.shapes import SsmKind

BANDWIDTH = 4e12
PLAIN = next(c for c in kernel_cases() if c.operation is Operation.UPDATE and c.tokens == 1 and c.window == 16)


def served(case: KernelCase) -> list[str]:
    return [peer.name for peer in PEERS if peer.serves(case)]


def test_every_step_of_a_float32_state_has_a_peer_and_no_other_has() -> None:
    for case in kernel_cases():
        names = served(case)
        if case.operation is Operation.PREFILL or case.read is not None or case.recurrence.value != "float32":
            assert names == []
        elif case.operation is Operation.CONVENTIONAL:
            assert names[0] == "vllm"
        else:
            assert "replayssm-fork" in names or "vllm" in names
        assert len(set(names)) == len(names)


def test_replay_of_both_recurrences_is_the_fork_s_but_mamba_2_s_plain_one_vllm_s() -> None:
    gdn = next(c for c in kernel_cases() if c.operation is Operation.UPDATE and c.shape.kind is SsmKind.GDN)
    assert served(replace(gdn, tokens=1)) == served(replace(gdn, tokens=4)) == ["replayssm-fork"]
    assert served(PLAIN) == ["vllm", "flashinfer"]
    assert served(replace(PLAIN, tokens=4)) == ["replayssm-fork", "flashinfer"]


@pytest.mark.gpu
@pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))
def test_the_fastest_variant_counts_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose step copies as many bytes as its variant says; one variant cannot be made."""
    import torch

    seen: list[tuple[int, int]] = []

    def make(case: KernelCase, batches: Batches, variant: Any) -> Step:
        if variant is None:
            raise ValueError("no such block")
        used = torch.cat(list(batches)).tolist()
        assert len(set(used)) == len(used) and min(used) == 1, "slot 0 is nobody's"
        source = torch.zeros(variant, device="cuda")
        target = torch.empty_like(source)

        def step(batch: int, h: int) -> None:
            assert len(batches[batch]) == case.rows
            seen.append((batch, h))
            target.copy_(source)

        return step

    shape = PLAIN.shape.kind
    fine = Peer("copy", "torch", shape, Operation.UPDATE, bool, (None, 64 << 20, 1 << 20), make)
    broken = Peer("none", "no-such-package", shape, Operation.UPDATE, bool, (None,), make)
    monkeypatch.setattr(peers, "PEERS", (fine, broken))
    case = replace(PLAIN, rows=32, tokens=2)
    accepted, rejected, refused = run_peers([case], BANDWIDTH, rounds=3)
    assert accepted["variant"] == rejected["variant"] == str(1 << 20)
    assert (accepted["accepted"], rejected["accepted"]) == (2, 1)
    assert accepted["us"] > 0 and accepted["version"] is not None
    assert {int(h) for h in accepted["by_h"]} == set(case.cycle(2)) and {h for _, h in seen} >= set(case.cycle(1))
    assert refused["reason"] == "ValueError: no such block" and refused["version"] is None
