"""Prompt chunks on the device and in the float64 specification, driven alike and compared: outputs, states, cursors.

Oracle: spec/replay.py. A state may be off by `FACTOR` times what plain float32 (records one by one, then the scan of
ops/reference) loses on the same chunk, plus one float32 step of the head's largest value: a BF16 or TF32 operand, or a
state that passes through one, is off by a hundred times that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.native import harness
from tests.native.twin import FollowingLayer, Twin, output_bound_of, torch_module
from tests.tolerance import FACTOR, FLOAT32_STEP
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.reference import prefill
from trtllm_replayssm.spec import cursors as spec_cursors
from trtllm_replayssm.spec.replay import Record, ReplayLayer, StepInputs, round_correction
from trtllm_replayssm.spec.ssm import l2_norm_factor, to_heads

CARRIES = 3
# Beside its own rounding an output may be off by twice this part of the head's largest one. Accepts sums of operands
# split to 17 bits, of terms that cancel within a token (D x against a token's own score); rejects BF16 or TF32 operands
# (2^-9, 2^-11).
OPERAND_NOISE = 2.0**-16


class PromptLayer(FollowingLayer):
    """Follows the device's corrections in steps; makes its own in prompts."""

    def _correction(self, source: Any, records: list[Record], record: Record) -> Any:
        if getattr(self, "given", None):
            return super()._correction(source, records, record)
        return ReplayLayer._correction(self, source, records, record)


class PromptTwin(Twin):
    """A pool with carries beside the specification. `worst`: largest state error over its bound so far."""

    worst = 0.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        torch = torch_module()
        s = self.shape
        self.carry = torch.full((CARRIES, s.heads, s.head_dim, s.state_dim), float("nan"), device="cuda")

    def admit(self, slot: int, origin: int = 0) -> None:
        super().admit(slot, origin)
        layer = PromptLayer(self.shape, self.config, layer=0, exact=not self.gdn)
        layer.checkpoint = self.layers[slot].checkpoint
        self.layers[slot] = layer

    def remember(self, slot: int, count: int) -> None:
        """Give `slot` that many committed records, on both sides, as steps would have left them."""
        torch = torch_module()
        s, cursors, ring = self.shape, self.cursors[slot], self.pool.tensors
        for j in range(count):
            rows = {name: tensor[0, 0] for name, tensor in self.make_rows([slot], [1], 1).items() if tensor.ndim > 1}
            host = {name: tensor.double().cpu().numpy() for name, tensor in rows.items()}
            record = Record(host["k"], np.ones(s.groups), np.zeros(0), host["value"])
            if self.gdn:
                record.key_factor = l2_norm_factor(host["k"]).astype(np.float32).astype(np.float64)
                record.log_decay, record.value = (
                    host["log_decay"],
                    round_correction(host["value"] * host["beta"][:, None]),
                )
            else:
                record.weight = host["dt"]
                record.log_decay = (host["dt"].astype(np.float32) * self.a).astype(np.float64)
            place = cursors.row(self.config, cursors.h + j)
            self.layers[slot].ring[place] = record
            stored = {"ring_k": record.key, "ring_value": record.value, "ring_key_factor": record.key_factor,
                      "ring_dt": record.log_decay if self.gdn else record.weight}  # fmt: skip
            for name, value in stored.items():
                if name in ring:
                    ring[name][slot, :, place] = torch.from_numpy(value).to(ring[name].dtype).cuda()
        cursors.h += count
        cursors.position += count
        ring["h"][slot], ring["position"][slot] = cursors.h, cursors.position

    def make_prompt(self, slots: list[int], counts: list[int], tokens: int) -> dict[str, Any]:
        """As `make_rows`, with value, k and q as parts of one projection."""
        torch = torch_module()
        rows = self.make_rows(slots, counts, tokens)
        parts = [rows[name].flatten(2) for name in ("q", "k", "value")]
        wide = torch.cat(parts, dim=-1)
        start = 0
        for name, part in zip(("q", "k", "value"), parts, strict=True):
            width = part.shape[-1]
            rows[name] = wide[..., start : start + width].unflatten(-1, rows[name].shape[2:])
            start += width
        return rows

    def prefill(
        self, slots: list[int], counts: list[int], tokens: int, *, last: list[bool] | None = None,
        fresh: tuple[int, ...] = (), carries: list[int] | None = None,
    ) -> None:  # fmt: skip
        """One chunk of these rows on both sides. last: False leaves the state in the carry; fresh: slots from zero."""
        torch = torch_module()
        rows = self.make_prompt(slots, counts, tokens)
        last = [True] * len(slots) if last is None else last
        flags = [self.flags(slot, slot in fresh, end) for slot, end in zip(slots, last, strict=True)]
        rows["row_flags"] = torch.tensor(flags, dtype=torch.int32, device="cuda")
        rows["carry_index"] = torch.tensor(carries or [0] * len(slots), dtype=torch.int32, device="cuda")
        s = self.shape
        out = torch.full((len(slots), tokens, s.heads, s.head_dim), float("nan"), dtype=self.dtype, device="cuda")
        before = {n: t.clone() for n, t in self.pool.tensors.items()}
        run_prefill(self.pool, rows, out, self.carry)
        torch.cuda.synchronize()
        host = {n: t.double().cpu().numpy() for n, t in rows.items()}
        self.check_untouched(before, [x if end else -1 for x, end in zip(slots, last, strict=True)], counts)
        self.check_ring(before)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            live = count if slot >= 0 else 0
            got = out[row].double().cpu().numpy()
            assert (got[live:] == 0).all(), "tokens beyond num_tokens are zero"
            if live == 0:
                continue
            if slot in fresh:
                self.layers[slot].checkpoint = np.zeros_like(self.layers[slot].checkpoint)
                self.cursors[slot].h = 0
            wanted, lost = self.expected_prompt(host, row, slot, live, last[row])
            largest = np.abs(wanted).max(axis=(0, 2), keepdims=True)
            self.check_output(got[:live], wanted, np.broadcast_to(largest, wanted.shape))
            state = self.pool.tensors["checkpoint"][slot] if last[row] else self.carry[(carries or [0])[row]]
            layer = self.layers[slot]
            self.check_prompt_state(state, layer.checkpoint if last[row] else layer.carry, lost)
        commit_prefill(self.pool, rows["slot"], rows["num_tokens"], tokens)
        for slot, count in zip(slots, counts, strict=True):
            if slot >= 0 and count > 0:
                spec_cursors.finish_prefill(self.cursors[slot], count)
        self.check_cursors()

    def flags(self, slot: int, fresh: bool, last: bool) -> int:
        flag = 0 if last else _abi.PrefillFlag.TO_CARRY
        if slot >= 0 and self.layers[slot].carry is not None:
            flag |= _abi.PrefillFlag.FROM_CARRY
        return int(flag | (_abi.PrefillFlag.FROM_ZERO if fresh else 0))

    def expected_prompt(self, host: dict[str, Any], row: int, slot: int, n: int, last: bool) -> tuple[Any, float]:
        """(outputs [n, H, P], what the float32 scan loses of the state, relative to a head's largest value)."""
        torch = torch_module()
        layer = self.layers[slot]
        part = {name: host[name][row, :n] for name in ("value", "k", "q")}
        before = torch.from_numpy(self.plain_fold(slot))
        tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in part.items()}
        x, k, q = (tensors[name] for name in ("value", "k", "q"))
        if self.gdn:
            g, beta = host["log_decay"][row, :n], host["beta"][row, :n]
            inputs = StepInputs(**part, log_decay=g, beta=beta)
            scalars = [torch.from_numpy(array.astype(np.float32)) for array in (g, beta)]
            _, plain = prefill.gdn_scan(self.shape, before, q, k, x, *scalars)
        else:
            dt = host["dt"][row, :n]
            log_decay = (dt.astype(np.float32) * self.a).astype(np.float64)
            inputs = StepInputs(**part, log_decay=log_decay, dt=dt)
            rates = [torch.from_numpy(array.astype(np.float32)) for array in (dt, self.a)]
            _, plain = prefill.mamba2_scan(self.shape, before, x, k, q, *rates)
        out = layer.prefill(self.cursors[slot], inputs, last=last)
        if not self.gdn:
            out = out + self.skip[:, None] * part["value"]
        exact = layer.checkpoint if last else layer.carry
        return out, float((np.abs(plain.numpy() - exact).max(axis=(1, 2)) / self.largest(exact)).max())

    def plain_fold(self, slot: int) -> Any:
        """The state before a prompt [H, P, N], its records folded one by one in float32."""
        layer, cursors = self.layers[slot], self.cursors[slot]
        if layer.carry is not None:
            return layer.carry.astype(np.float32)
        state = layer.checkpoint.astype(np.float32)
        for j in range(cursors.h):
            record = layer.ring[cursors.row(self.config, j)]
            assert record is not None
            value = record.value if record.weight is None else record.weight[:, None] * record.value
            keys = to_heads(self.shape, record.key * record.key_factor[:, None]).astype(np.float32)
            decay = np.exp(record.log_decay.astype(np.float32))
            state = decay[:, None, None] * state + value.astype(np.float32)[:, :, None] * keys[:, None, :]
        return state

    def check_output(self, got: Any, expected: Any, magnitude: Any) -> None:
        bound = output_bound_of(self.act, expected, magnitude, OPERAND_NOISE)
        assert np.isfinite(got).all(), "no poison in an output"
        share = np.abs(got - expected) / bound
        worst = np.unravel_index(np.argmax(share), got.shape)
        assert (share <= 1.0).all(), (worst, got[worst], expected[worst], share[worst], int((share > 1.0).sum()))

    @staticmethod
    def largest(state: Any) -> Any:
        return np.abs(state).max(axis=(1, 2)) + 1e-30

    def check_prompt_state(self, device: Any, exact: Any, lost: float) -> None:
        got = device.double().cpu().numpy()
        assert np.isfinite(got).all(), "no poison in a state"
        error = float((np.abs(got - exact).max(axis=(1, 2)) / self.largest(exact)).max())
        bound = FACTOR * lost + FLOAT32_STEP
        self.worst = max(self.worst, error / bound)
        assert error <= bound, (error, lost)

    def check_ring(self, before: dict[str, Any]) -> None:
        """A prompt leaves the ring alone."""
        torch = torch_module()
        for name, tensor in self.pool.tensors.items():
            if name.startswith("ring"):
                bits = torch.int16 if tensor.element_size() == 2 else torch.int32
                assert torch.equal(tensor.view(bits), before[name].view(bits)), name

    def check_cursors(self) -> None:
        for slot, cursors in self.cursors.items():
            for name, value in (("origin", cursors.origin), ("h", cursors.h), ("position", cursors.position)):
                assert int(self.pool.tensors[name][slot]) == value, (name, slot)


def prefill_args(pool: harness.Pool, rows: dict[str, Any], out: Any, carry: Any = None) -> _abi.PrefillArgs:
    """The struct for one layer's chunk; rows as `PromptTwin.make_prompt` with or without row_flags, carry_index."""
    kind = _abi.Kind.MAMBA2 if pool.shape.kind.value == "mamba2" else _abi.Kind.GDN
    tensors = {"out": out, **rows, **pool.tensors} | ({} if carry is None else {"carry": carry})
    return _abi.PrefillArgs(
        kind=int(kind), window=pool.config.window, **{name: harness.view(t) for name, t in tensors.items()}
    )


def run_prefill(pool: harness.Pool, rows: dict[str, Any], out: Any, carry: Any = None, workspace: Any = None) -> None:
    """Enqueue the scan; a workspace full of NaN is made when none is given."""
    torch = torch_module()
    args = prefill_args(pool, rows, out, carry)
    if workspace is None:
        workspace = torch.full((pool.native.prefill_workspace(args),), 255, dtype=torch.uint8, device="cuda")
    pool.native.prefill(args, workspace.data_ptr(), workspace.numel(), pool._stream())


def commit_prefill(pool: harness.Pool, slot: Any, num_tokens: Any, tokens: int) -> None:
    views = {name: harness.view(pool.tensors[name]) for name in ("origin", "h", "position")}
    args = _abi.PrefillCommitArgs(
        max_tokens=tokens, slot=harness.view(slot), num_tokens=harness.view(num_tokens), **views
    )
    pool.native.prefill_commit(args, pool._stream())
