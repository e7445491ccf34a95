"""A narrow twin's layer on the device with static inputs, for tests that launch again and again or capture graphs."""

from __future__ import annotations

from typing import Any

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.narrow import LAYER, NarrowTwin, state_tensors
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.views import view
from trtllm_replayssm.shapes import SsmKind

SLOTS = 3


class DevicePool:
    """A twin's state, cursors and static inputs on the device, and the calls over them. Tensors as in update.h."""

    def __init__(self, twin: NarrowTwin, rows: dict[str, Any], slots: list[int]) -> None:
        import torch

        self.twin = twin
        self.state = {name: tensor.cuda() for name, tensor in state_tensors(twin.state).items()}
        self.cursors = {n: getattr(twin.cursors, n).cuda() for n in ("origin", "h", "position", "seed")}
        self.inputs = {name: tensor.cuda() for name, tensor in rows.items()}
        if not twin.gdn:
            self.inputs |= {"a": twin.a.cuda(), "skip": twin.skip.cuda()}
        self.slot = torch.tensor(slots, dtype=torch.int32, device="cuda")
        self.num_tokens = torch.ones(len(slots), dtype=torch.int32, device="cuda")
        self.out = torch.full_like(self.inputs["value"], float("nan"))
        self.workspace = torch.zeros(256, dtype=torch.uint8, device="cuda")

    def update(self, flags: int = 0) -> None:
        step = {"slot": self.slot, "num_tokens": self.num_tokens, "out": self.out}
        tensors = {**self.state, **self.inputs, **self.cursors, **step}
        args = _abi.UpdateArgs(
            kind=int(_abi.Kind.GDN if self.twin.gdn else _abi.Kind.MAMBA2), window=self.twin.config.window, layer=LAYER,
            flags=flags, **{name: view(tensor) for name, tensor in tensors.items()},
        )  # fmt: skip
        self.twin.native.update(args, self.workspace.data_ptr(), self.workspace.numel(), harness.Pool._stream())

    def commit(self) -> None:
        """Every row keeps its token."""
        args = _abi.CommitArgs(
            window=self.twin.config.window, ring_rows=self.twin.config.ring_rows, slot=view(self.slot),
            num_tokens=view(self.num_tokens), accepted=view(self.num_tokens),
            **{name: view(self.cursors[name]) for name in ("origin", "h", "position")},
        )  # fmt: skip
        self.twin.native.commit(args, harness.Pool._stream())

    def bits(self) -> dict[str, Any]:
        import torch

        tensors = {**self.state, **self.cursors, "out": self.out}
        return {name: tensor.contiguous().view(torch.uint8).cpu() for name, tensor in tensors.items()}


def make_twin(
    library: _abi.Library, kind: SsmKind, head_dim: int, formats: tuple[StateFormat, StateFormat | None]
) -> NarrowTwin:
    """SLOTS sequences with 0, 2 and 4 committed records in a window of 4: the last one's next step flushes."""
    recurrence, read = formats
    shape = ssm_shape(kind, heads=4, groups=2, head_dim=head_dim, state_dim=128)
    config = ReplayConfig(window=4, max_step_tokens=1, recurrence=recurrence, read=read)
    twin = NarrowTwin(library, shape, config, "bfloat16", slots=SLOTS)
    for slot in range(SLOTS):
        twin.admit(slot, h=2 * slot, origin=slot)
    return twin
