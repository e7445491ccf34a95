"""The native conventional step against the recurrence in float64: outputs, every snapshot, padding and foreign slots.

Oracle: spec/ssm.py on the same inputs. The state stays in float32, so the bound on it is some float32 steps a token of
the head's largest value (a TF32 or BF16 operand is off by 2^-11 or 2^-9); outputs keep to bench/rounding.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.twin import output_bound_of
from trtllm_replayssm.bench.rounding import STEP_OPERANDS
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import ssm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

STATE_BOUND = 1e-6  # of the head's largest value, a token
SHAPES = [
    pytest.param(ssm_shape(SsmKind.MAMBA2, 12, 2, 80, 128), id="mamba2-80"),
    pytest.param(ssm_shape(SsmKind.MAMBA2, 8, 2, 64, 128), id="mamba2-64"),
    pytest.param(ssm_shape(SsmKind.GDN, 8, 4, 128, 128), id="gdn-128"),
]


class Problem:
    """Random inputs of one step on the device, NaN where nothing may be read, and the same numbers on the host."""

    def __init__(
        self, shape: SsmShape, slots: list[int], counts: list[int], tokens: int, entries: int, act: str
    ) -> None:
        import torch

        self.shape, self.slots, self.counts, self.tokens, self.act = shape, slots, counts, tokens, act
        rng, b, s = np.random.default_rng(3), len(slots), shape
        self.entry = rng.integers(0, entries, max(slots) + 2)
        sizes = (max(slots) + 2, entries, s.heads, s.head_dim, s.state_dim)
        self.states = rng.standard_normal(sizes).astype(np.float32)
        inputs = {
            "value": rng.standard_normal((b, tokens, s.heads, s.head_dim)),
            "k": rng.standard_normal((b, tokens, s.groups, s.state_dim)),
            "q": rng.standard_normal((b, tokens, s.groups, s.state_dim)),
        }
        self.rows = {name: torch.from_numpy(t).to(getattr(torch, act)) for name, t in inputs.items()}
        if s.kind is SsmKind.MAMBA2:
            self.a, self.skip = (-rng.uniform(0.2, 16, s.heads)).astype(np.float32), rng.standard_normal(s.heads)
            dt = np.exp(rng.uniform(-7, -1, (b, tokens, s.heads)))
            self.rows |= {"dt": torch.from_numpy(dt.astype(np.float32)), "a": torch.from_numpy(self.a)}
            self.rows["skip"] = torch.from_numpy(self.skip.astype(np.float32))
        else:
            log_decay = -np.exp(rng.uniform(-6, 1, (b, tokens, s.heads)))
            self.rows["log_decay"] = torch.from_numpy(log_decay.astype(np.float32))
            self.rows["beta"] = torch.from_numpy(rng.uniform(0, 1, (b, tokens, s.heads)).astype(np.float32))
        for name in self.rows.keys() - {"a", "skip"}:
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                self.rows[name][row, count if slot >= 0 else 0 :] = float("nan")
        indices = torch.full((b, 3), 123456, dtype=torch.int32)
        indices[:, 0], indices[:, 1] = torch.tensor(slots), torch.tensor(counts)
        self.device = {name: tensor.cuda() for name, tensor in self.rows.items()}
        self.device |= {"slot": indices.cuda()[:, 0], "num_tokens": indices.cuda()[:, 1]}
        self.device["entry"] = torch.from_numpy(self.entry.astype(np.int32)).cuda()
        self.state = torch.from_numpy(self.states).cuda().flatten(3)
        self.out = torch.full((b, tokens, s.heads, s.head_dim), float("nan"), dtype=getattr(torch, act), device="cuda")

    def run(self, library: _abi.Library, flags: int = 0) -> None:
        import torch

        kind = _abi.Kind.MAMBA2 if self.shape.kind is SsmKind.MAMBA2 else _abi.Kind.GDN
        views = {name: harness.view(tensor) for name, tensor in self.device.items()}
        args = _abi.ConventionalArgs(kind=int(kind), flags=flags, out=harness.view(self.out),
                                     state=harness.view(self.state), **views)  # fmt: skip
        library.conventional_update(args, int(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()

    def step(self, state: Any, row: int, token: int) -> tuple[Any, Any]:
        """Output with skip and next state, float64, of one token."""
        host = {name: t[row, token].double().numpy() for name, t in self.rows.items() if name not in ("a", "skip")}
        if self.shape.kind is SsmKind.GDN:
            return ssm.gdn_step(self.shape, state, host["k"], host["q"], host["value"], host["log_decay"], host["beta"])
        rate = self.a.astype(np.float64)
        out, new = ssm.mamba2_step(self.shape, state, host["value"], host["k"], host["q"], host["dt"], rate)
        return out + self.rows["skip"].double().numpy()[:, None] * host["value"], new

    def magnitude(self, before: Any, after: Any, row: int, token: int) -> Any:
        """[H, P]: the sum of the magnitudes of an output's terms, those of the new state taken apart."""
        host = {name: t[row, token].double().numpy() for name, t in self.rows.items() if name not in ("a", "skip")}
        gdn = self.shape.kind is SsmKind.GDN
        decayed = np.exp(host["log_decay"] if gdn else host["dt"] * self.a)[:, None, None] * before
        query = ssm.to_heads(self.shape, host["q"] * ssm.l2_norm_factor(host["q"])[:, None] if gdn else host["q"])
        query = query / np.sqrt(self.shape.state_dim) if gdn else query
        read = np.einsum("hpn,hn->hp", np.abs(decayed) + np.abs(after - decayed), np.abs(query))
        return read if gdn else read + np.abs(self.rows["skip"].double().numpy()[:, None] * host["value"])

    def check(self) -> None:
        got_states = self.state.cpu().numpy().reshape(self.states.shape)
        expected_states = self.states.copy()
        outputs = self.out.double().cpu().numpy()
        for row, (slot, count) in enumerate(zip(self.slots, self.counts, strict=True)):
            live = count if slot >= 0 else 0
            assert (outputs[row, live:] == 0).all()
            if not live:
                continue
            entry = int(self.entry[slot])
            state = self.states[slot, entry].astype(np.float64)
            for token in range(live):
                before = state
                expected, state = self.step(state, row, token)
                sizes = self.magnitude(before, state, row, token)
                bound = output_bound_of(self.act, expected, sizes, STEP_OPERANDS)
                assert (np.abs(outputs[row, token] - expected) <= bound).all(), (row, token)
                entry = (entry + 1) % self.states.shape[1]
                error = np.abs(got_states[slot, entry] - state).max(axis=(1, 2))
                assert (error <= STATE_BOUND * (token + 1) * np.abs(state).max(axis=(1, 2))).all(), (row, token, error)
                expected_states[slot, entry] = got_states[slot, entry]
        assert (got_states.view(np.int32) == expected_states.view(np.int32)).all(), "other entries keep every bit"


@pytest.mark.parametrize("rows", [1, 9, 70], ids=lambda n: f"B{n}")
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_step_in_place_matches_the_recurrence(
    library: _abi.Library, shape: SsmShape, act: str, rows: int
) -> None:
    slots = [(7 * row) % (rows + 1) if row % 5 != 3 else -1 for row in range(rows)]
    problem = Problem(shape, slots, [1] * len(slots), tokens=1, entries=1, act=act)
    problem.run(library)
    problem.check()


@pytest.mark.parametrize("flags", [0, _abi.CONVENTIONAL_PROGRAMMATIC_LAUNCH])
@pytest.mark.parametrize("tokens", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_verification_leaves_a_state_after_each_token(
    library: _abi.Library, shape: SsmShape, tokens: int, flags: int
) -> None:
    counts = [tokens, 1, 0, tokens - 1, tokens, tokens]
    problem = Problem(shape, [4, 0, 2, 6, -1, 3], counts, tokens, entries=tokens + 1, act="bfloat16")
    problem.run(library, flags)
    problem.check()


def test_wrong_calls_are_named(library: _abi.Library) -> None:
    problem = Problem(SHAPES[1].values[0], [0, 1], [3, 3], tokens=3, entries=3, act="bfloat16")
    with pytest.raises(ContractError, match=r"max\(E - 1, 1\) = 2, got 3"):
        problem.run(library)
    narrow = Problem(ssm_shape(SsmKind.MAMBA2, 4, 2, 24, 128), [0], [1], 1, 1, "bfloat16")
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        narrow.run(library)
