"""A bundle made by hand, whose engines are torch functions: a session over it runs on a GPU without TensorRT.

One recurrent layer: engine, convolution, recurrence, engine; and a drafting head of one engine. Projections are wider
than what the operations read of them. No test here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from trtllm_replayssm.bindings import (
    CONV1D,
    GDN,
    HIDDEN,
    HIDDEN_IN,
    IDS,
    LOGITS,
    MAMBA2,
    TOKEN_INDEX,
    EngineStep,
    OpStep,
    Program,
    TensorSpec,
    View,
    step_inputs,
)
from trtllm_replayssm.builders.profiles import make_profiles
from trtllm_replayssm.config import CudaGraphConfig, ReplayConfig
from trtllm_replayssm.manifest import FORMAT_VERSION, BuildInfo, Manifest
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession, pools_of
from trtllm_replayssm.shapes import LayerKind, ModelGeometry, SsmKind, SsmShape
from trtllm_replayssm.weights.presets import preset_geometry

PAD = 16  # channels of a projection before what the operations read
SLOTS, DEPTH, CHUNK = 4, 256, 32
REPLAY = ReplayConfig(window=8, max_step_tokens=4)


def geometry(kind: SsmKind) -> ModelGeometry:
    mamba = kind is SsmKind.MAMBA2
    shape = SsmShape(
        kind=kind, heads=8, groups=2 if mamba else 4, head_dim=64 if mamba else 128, state_dim=128, conv_kernel=4,
        conv_bias=True,
    )  # fmt: skip
    base = preset_geometry("nemotron-3-nano-4b" if mamba else "qwen3.5-4b")
    return replace(
        base, layers=(LayerKind.SSM,), ssm=shape, hidden=64, vocab=128, mtp_pattern=(LayerKind.ATTENTION,), moe=None
    )


def programs(made: ModelGeometry) -> dict[str, Program]:
    ssm, inputs = made.ssm, step_inputs(made, "bfloat16")

    def spec(name: str, dtype: str, width: int, tokens: str = "T") -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, dims=("B", tokens, width))

    results = [spec(HIDDEN, "bfloat16", made.hidden), spec(LOGITS, "float32", made.vocab, "K")]
    between = [
        spec("projection", "bfloat16", PAD + ssm.conv_channels), spec("rate", "float32", ssm.heads),
        spec("beta", "float32", ssm.heads), spec("mixed", "bfloat16", ssm.conv_channels),
        spec("out", "bfloat16", ssm.inner),
    ]  # fmt: skip

    def program(name: str, given: tuple[str, ...], own: list[TensorSpec], *steps: EngineStep | OpStep) -> Program:
        tensors = {s.name: s for s in (*(inputs[n] for n in given), *own, *results)}
        return Program(name=name, tensors=tensors, outputs={HIDDEN: HIDDEN, LOGITS: LOGITS}, steps=steps)

    first, last = _engine("first", (IDS,), ("projection", "rate", "beta")), _engine("last", ("out", TOKEN_INDEX))
    head = _engine("head", (IDS, HIDDEN_IN, TOKEN_INDEX))
    return {
        "main": program("main", (IDS, TOKEN_INDEX), between, first, *_operations(ssm), last),
        "mtp": program("mtp", (IDS, HIDDEN_IN, TOKEN_INDEX), [], head),
    }


def _engine(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...] = (HIDDEN, LOGITS)) -> EngineStep:
    return EngineStep(engine=name, inputs={n: n for n in inputs}, outputs={n: n for n in outputs})


def _operations(ssm: SsmShape) -> tuple[OpStep, OpStep]:
    keys, inner, mamba = ssm.key_channels, ssm.inner, ssm.kind is SsmKind.MAMBA2
    bounds = {"x": (0, inner), "k": (inner, keys), "q": (inner + keys, keys)}
    if not mamba:
        bounds = {"q": (0, keys), "k": (keys, keys), "v": (2 * keys, inner)}
    views = {name: View(tensor="mixed", start=begin, width=size) for name, (begin, size) in bounds.items()}
    rates = {"dt": "rate"} if mamba else {"log_decay": "rate", "beta": "beta"}
    views |= {name: View(tensor=tensor, start=0, width=ssm.heads) for name, tensor in rates.items()}
    x = View(tensor="projection", start=PAD, width=ssm.conv_channels)
    taps = {"weight": "taps", "bias": "bias"}
    vectors = {"a_log": "a_log", "skip": "skip"} if mamba else {}
    return (
        OpStep(op=CONV1D, layer=0, inputs={"x": x}, outputs={"out": "mixed"}, weights=taps),
        OpStep(op=MAMBA2 if mamba else GDN, layer=0, inputs=views, outputs={"out": "out"}, weights=vectors),
    )


class TorchEngines:
    """Implements `tensorrt_program.Engines`. enqueued: (engine, whether its context is its own), call by call."""

    def __init__(self, made: ModelGeometry, device: torch.device) -> None:
        random, ssm = torch.Generator().manual_seed(1), made.ssm
        sizes = {
            "projection": (made.vocab, PAD + ssm.conv_channels), "rate": (made.vocab, ssm.heads),
            "beta": (made.vocab, ssm.heads), "embedding": (made.vocab, made.hidden),
            "down": (made.hidden, ssm.inner), "up": (made.vocab, made.hidden),
        }  # fmt: skip
        self._weights = {n: (torch.randn(s, generator=random) / 4).to(device) for n, s in sizes.items()}
        self._decays = -1.0 if ssm.kind is SsmKind.GDN else 1.0
        self._run = {"first": self._first, "last": self._last, "head": self._head}
        self.enqueued: list[tuple[str, bool]] = []

    def bind(
        self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, own: bool
    ) -> Callable[[], None]:
        def run() -> None:
            self.enqueued.append((engine, own))
            with disable_current_modes():  # the device's work
                for name, value in self._run[engine](inputs).items():
                    outputs[name].copy_(value)

        return run

    def obstacle(self) -> str | None:
        return None

    def save_kernels(self) -> None:
        pass

    def _first(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        chosen = {n: functional.embedding(given[IDS].long(), self._weights[n]) for n in ("projection", "rate", "beta")}
        return {**chosen, "rate": self._decays * chosen["rate"].abs(), "beta": chosen["beta"].sigmoid()}

    def _last(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._results(functional.linear(given["out"].float(), self._weights["down"]), given)

    def _head(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embedded = functional.embedding(given[IDS].long(), self._weights["embedding"])
        return self._results(given[HIDDEN_IN].float() + embedded, given)

    def _results(self, hidden: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = hidden.bfloat16()
        index = given[TOKEN_INDEX].long()[..., None].expand(-1, -1, hidden.shape[-1])
        return {HIDDEN: hidden, LOGITS: functional.linear(hidden.gather(1, index).float(), self._weights["up"])}


def open_session(kind: SsmKind, directory: Path, device: str, cuda_graphs: CudaGraphConfig | None) -> TensorRtSession:
    """directory: gets the vectors of the native operations."""
    made, random = geometry(kind), np.random.default_rng(2)
    ssm = made.ssm
    shapes = {
        "taps": (ssm.conv_channels, 1, ssm.conv_kernel), "bias": (ssm.conv_channels,), "a_log": (ssm.heads,),
        "skip": (ssm.heads,),
    }  # fmt: skip
    (directory / "weights").mkdir(exist_ok=True)
    vectors = {n: random.standard_normal(s).astype(np.float32) / 2 for n, s in shapes.items()}
    save_file(vectors, directory / "weights" / "vectors.safetensors")
    info = BuildInfo(
        flavour="tensorrt_rtx", tensorrt_version="none", product_version="none", target="12.0", activation="bfloat16",
        weights="checkpoint", checkpoint="none", max_batch=SLOTS, max_seq_len=DEPTH, context_rows=1,
        context_tokens=CHUNK, tp_size=1, tp_rank=0, peak_rss_bytes=0, seconds=0.0,
    )  # fmt: skip
    profiles = make_profiles(
        max_batch=SLOTS, max_step_tokens=REPLAY.max_step_tokens, context_rows=1, context_tokens=CHUNK,
        max_seq_len=DEPTH,
    )  # fmt: skip
    manifest = Manifest(
        format_version=FORMAT_VERSION, build=info, geometry=made, replay=REPLAY, profiles=profiles,
        programs=programs(made), memory={}, files={},
    )  # fmt: skip
    pools = pools_of(manifest, None, device)
    engines = TorchEngines(made, pools.cursors.position.device)
    return TensorRtSession(manifest, directory, engines, pools, cuda_graphs=cuda_graphs)
