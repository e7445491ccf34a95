"""The step with one kernel for its inputs, one for its tokens and one for its outcome, in place of some eighty."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import native_draw, native_registers
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.ports import DraftPort, StepPort
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.sampling import pick
from trtllm_replayssm.runtime.device.step import Chosen, DeviceStep


def is_native(device: torch.device, vocab: int) -> bool:
    """Whether `NativeStep` and the drafters' kernels serve this device."""
    return native_draw.serves(device, vocab)


def choose(logits: Tensor, registers: Registers, row: Tensor, mode: SamplingMode, *, native: bool) -> list[int]:
    """One token for each row of logits [B, 1, V] float32; waits for the device. mode: at least what the rows need."""
    if native:
        tokens, _ = native_draw.draw(logits, row, registers.settings())
    else:
        tokens = pick(logits, registers, row, mode).tokens
    chosen: list[int] = tokens[:, 0].tolist()
    return chosen


class NativeStep(DeviceStep):
    """`DeviceStep` on CUDA: the same registers, reports and tokens."""

    def __init__(self, port: StepPort, registers: Registers, drafter: DraftPort | None, mode: SamplingMode) -> None:
        """As `DeviceStep`; where drafts are not drawn, every mode is the same."""
        super().__init__(port, registers, drafter, mode)
        batch, device = port.ids.shape[0], port.ids.device
        self._row = torch.zeros(batch, dtype=torch.int64, device=device)
        self._emitted = torch.zeros(batch, dtype=torch.int32, device=device)

    def _inputs(self) -> Tensor:
        port, registers = self.port, self._registers
        read = {name: getattr(registers, name) for name in ("last", "room", "draft", "draft_count")}
        native_registers.step_inputs(read, port.slot, port.ids, port.num_tokens, self._row)
        return self._row

    def _picked(self, logits: Tensor, row: Tensor) -> Chosen:
        tokens, finite = native_draw.draw(logits, row, self._registers.settings())
        return Chosen(tokens, finite, None)

    def _outcome(self, chosen: Chosen, row: Tensor) -> Tensor:
        port, registers = self.port, self._registers
        changed = {name: getattr(registers, name) for name in ("draft", "stop_ids", "last", "length", "room")}
        changed["history"] = registers.history if registers.keeps_history else None
        native_registers.step_outcome(
            changed, port.slot, port.num_tokens, chosen.tokens, chosen.finite.int(), chosen.count, self._emitted,
            self.report,
        )  # fmt: skip
        return self._emitted
