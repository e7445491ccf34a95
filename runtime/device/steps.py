"""The device's side of the loop: registers, one captured step per shape, reports on their way to the host.

Two launches may be in flight: the one that runs and the one behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.device.entry import DeviceEntry, RowReport, SamplingMode
from trtllm_replayssm.runtime.device.native_step import NativeStep, choose, is_native
from trtllm_replayssm.runtime.device.ports import DraftPort, Graphs, StepPort
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.step import DeviceStep

IN_FLIGHT = 2
_DRAWN_AT_ONCE = 64  # rows of logits on their way to the device


@dataclass(frozen=True)
class _Shape:
    batch: int
    mode: SamplingMode


class _Program:
    """A captured step with the host's ends of its inputs and reports, one of each per launch in flight."""

    def __init__(self, step: DeviceStep, run: Callable[[], None]) -> None:
        self._step = step
        self._run = run
        self._cuda = step.report.is_cuda
        self._slots = [torch.empty_like(step.port.slot, device="cpu", pin_memory=self._cuda) for _ in range(IN_FLIGHT)]
        self._reports = [torch.empty_like(step.report, device="cpu", pin_memory=self._cuda) for _ in range(IN_FLIGHT)]

    def launch(self, slots: Sequence[int], lane: int) -> _Flight:
        """Run the step over these slots without waiting for it. lane: 0..IN_FLIGHT - 1, of no launch in flight."""
        inputs, report = self._slots[lane], self._reports[lane]
        inputs.fill_(-1)
        inputs[: len(slots)] = torch.tensor(slots, dtype=inputs.dtype)
        self._step.port.slot.copy_(inputs, non_blocking=True)
        self._run()
        report.copy_(self._step.report, non_blocking=True)
        done = torch.cuda.Event() if self._cuda else None
        if done is not None:
            done.record()
        return _Flight(report[: len(slots)], done)


@dataclass(frozen=True)
class _Flight:
    """A launch: its report [rows, T + EXTRA] on the host, valid when `done` has come (None: already)."""

    report: Tensor
    done: torch.cuda.Event | None

    @property
    def ended(self) -> bool:
        """Whether the device is known to have ended it: what runs on a CPU has ended, and nothing waits there."""
        return self.done is not None and bool(self.done.query())


class DeviceSteps:
    """See the module. One per engine; one thread owns it."""

    def __init__(
        self,
        make_step: Callable[[int, int], StepPort],
        graphs: Graphs,
        drafter: DraftPort | None,
        *,
        slots: int,
        buckets: Sequence[int],
        recorded: Collection[int],
        device: torch.device,
        vocab: int,
        rows_for: Callable[[Sequence[int]], int] = len,
    ) -> None:
        """make_step(batch, width): a session's static step. buckets: batch sizes to run at, rising; rows are padded.
        recorded: those whose steps can be recorded; the others are launched operation by operation. rows_for: rows
        that a step of these slots needs.
        """
        self.max_draft_len = 0 if drafter is None else drafter.max_draft_len
        self._draws = drafter is not None and drafter.draws
        self.registers = Registers.allocate(
            slots, self.max_draft_len, 0 if drafter is None else drafter.positions, device,
            drawn_vocab=vocab if self._draws else 0,
        )  # fmt: skip
        self._vocab = vocab
        self._rows_for = rows_for
        self._native = is_native(device, vocab)
        self._make_step = make_step
        self._graphs = graphs
        self._drafter = drafter
        self._buckets = tuple(buckets)
        self._recorded = frozenset(recorded)
        self._ports: dict[int, StepPort] = {}
        self._programs: dict[_Shape, _Program] = {}
        self._flights: list[_Flight] = []
        self._launches = 0

    def warm_up(self) -> None:
        """Make and capture every program that a launch can need. Moves no state."""
        for bucket in reversed(self._buckets):  # the others fit in the largest one's memory
            for mode in self._modes:
                self._program(_Shape(bucket, mode))

    @torch.inference_mode()
    def enter(self, entries: Sequence[DeviceEntry]) -> None:
        """Requests begin to decode here. Their slots are in no launch that is still to come."""
        if entries:
            self.registers.enter(entries)

    @torch.inference_mode()
    def draw(
        self, entries: Sequence[DeviceEntry], logits: Sequence[NDArray[np.float32]], mode: SamplingMode
    ) -> list[int]:
        """The token behind each request's own, from logits [V] float32 on the host; waits for the device.

        mode: at least what the requests need. Their slots do not matter.
        """
        device, tokens = self.registers.last.device, []
        for begin in range(0, len(entries), _DRAWN_AT_ONCE):
            part = [replace(e, slot=i) for i, e in enumerate(entries[begin : begin + _DRAWN_AT_ONCE])]
            registers = Registers.allocate(len(part), 0, 0, device)
            registers.enter(part)
            rows = torch.arange(len(part), device=device)
            scores = torch.from_numpy(np.stack(logits[begin : begin + len(part)]))[:, None].to(device)
            tokens += choose(scores, registers, rows, mode, native=self._native)
        return tokens

    @torch.inference_mode()
    def launch(self, slots: Sequence[int], mode: SamplingMode) -> bool:
        """Run one step of these slots, in order, without waiting -> whether the device had ended the launch in flight,
        and waited for this one. `read` must have caught up to one launch.
        """
        if len(self._flights) >= IN_FLIGHT:
            raise ContractError("launch", "step", expected=f"fewer than {IN_FLIGHT} launches in flight", got="no read")
        rows = self._rows_for(slots)
        bucket = next((b for b in self._buckets if b >= rows), None)
        if bucket is None:
            raise ContractError("launch", "slots", expected=f"at most {self._buckets[-1]} rows", got=rows)
        program = self._program(_Shape(bucket, next(known for known in self._modes if known >= mode)))
        late = bool(self._flights) and self._flights[-1].ended
        self._flights.append(program.launch(slots, self._launches % IN_FLIGHT))
        self._launches += 1
        return late

    def read(self) -> list[RowReport]:
        """What the oldest launch in flight emitted, row by row; waits for that launch alone."""
        flight = self._flights.pop(0)
        if flight.done is not None:
            flight.done.synchronize()
        reports = []
        for *tokens, emitted, num_tokens, broken in flight.report.tolist():
            reports.append(RowReport(tuple(tokens[:emitted]), num_tokens, bool(broken)))
        return reports

    def drafts(self, slot: int) -> tuple[tuple[int, ...], NDArray[np.float64] | None]:
        """The drafts of the slot's next step, and the probabilities [n, V] that a sampled request's were drawn from,
        None where none are drawn; waits for the device."""
        count = int(self.registers.draft_count[slot])
        drafts = tuple(self.registers.draft[slot, :count].tolist())
        if not drafts or not self.registers.draft_weights.shape[2]:
            return drafts, None
        return drafts, self.registers.draft_weights[slot, :count, : self._vocab].double().cpu().numpy()

    @property
    def _modes(self) -> Sequence[SamplingMode]:
        """Those that steps are made for, cheapest first: the kernel looks at each row's settings, so that one serves
        all.
        """
        return tuple(SamplingMode) if not self._native or self._draws else (SamplingMode.FILTERED,)

    def _program(self, shape: _Shape) -> _Program:
        program = self._programs.get(shape)
        if program is None:
            width = 1 + self.max_draft_len
            if shape.batch not in self._ports:
                self._ports[shape.batch] = self._make_step(shape.batch, width)
            port = self._ports[shape.batch]
            kind = NativeStep if self._native else DeviceStep
            step = kind(port, self.registers, self._drafter, shape.mode)
            port.slot.fill_(-1)  # the runs before a capture are real
            run = self._graphs.captured(step.run) if shape.batch in self._recorded else step.run
            program = self._programs[shape] = _Program(step, run)
        return program
