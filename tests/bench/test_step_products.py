"""The bound of a step by rates at its products' shapes: which products it has, their least times, what is timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.bench.step import measure, product_times, run
from trtllm_replayssm.bench.step.cases import CACHES, Schedule, StepCase
from trtllm_replayssm.bench.step.floor import StepFloor
from trtllm_replayssm.bench.step.model import step_model
from trtllm_replayssm.bench.step.product_times import time_products
from trtllm_replayssm.bench.step.products import Ceilings, ProductShape, StepProduct, shape_bound, step_products
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.shapes import LayerKind, ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.presets import preset_geometry, preset_names, slice_geometry
from trtllm_replayssm.weights.sizes import StepParameter, step_parameters

SMALL = ("nemotron-dense", "nemotron-moe", "qwen-dense", "qwen-moe")


def geometry_of(name: str) -> ModelGeometry:
    if name in SMALL:
        return slice_geometry(Checkpoint.open(CHECKPOINTS / name).geometry, None, mtp=False)
    return slice_geometry(preset_geometry(name), None, mtp=False)


def parameters_of(geometry: ModelGeometry, tokens: int) -> list[StepParameter]:
    return step_parameters(geometry, lambda _: MatrixFormat.BF16, 2, tokens)


def products_of(geometry: ModelGeometry, tokens: int) -> Counter[StepProduct]:
    return step_products(geometry, parameters_of(geometry, tokens), tokens)


def test_the_bound_takes_the_longest_of_bytes_large_rate_and_rate_of_the_shape_for_each_product() -> None:
    """10 bytes and 4 operations a second. Twice a product of 12 operations that takes 5 s alone, not 3 s; one of 50
    bytes that takes 1 s alone, not 5 s; experts of 40 operations whose shape has 60 and takes 18 s: 12 s.
    """
    dense, wide, experts = ProductShape(1, 1, 2, 3), ProductShape(1, 1, 1, 1), ProductShape(5, 2, 1, 3)
    products = {
        StepProduct(("a",), dense, 10.0, 12.0): 2, StepProduct(("b",), wide, 50.0, 2.0): 1,
        StepProduct(("c",), experts, 20.0, 40.0): 1,
    }  # fmt: skip
    ceilings = Ceilings(10.0, 4.0, {dense: 5.0, wide: 1.0, experts: 18.0})
    floor = StepFloor(weights=95.0, states=40.0, windows=5.0, kv=4.0, logits=1.0)
    others = (145.0 - 90.0) / 10.0  # a looked-up embedding or a norm among the weights is no product
    assert shape_bound(floor, products, ceilings) == pytest.approx(2 * 5.0 + 5.0 + 12.0 + others)
    fast = Ceilings(10.0, 4.0, dict.fromkeys((dense, wide, experts), 1e-9))
    assert shape_bound(floor, products, fast) == pytest.approx(2 * 3.0 + 5.0 + 10.0 + others)  # nothing beats the large


@pytest.mark.parametrize("name", [*SMALL, *preset_names()])
def test_each_matrix_is_in_one_product_of_its_size(name: str) -> None:
    geometry = geometry_of(name)
    tokens, multiplied = 6, [p for p in parameters_of(geometry, 6) if p.multiplications]
    products = products_of(geometry, tokens)
    words = Counter(".".join(p.spec.name.removesuffix(".weight").split(".")[-2:]) for p in multiplied)
    found: Counter[str] = Counter()
    for product, count in products.items():
        found.update(dict.fromkeys(product.matrices, count))
    assert found == words
    dense = sum(math.prod(p.spec.shape) for p in multiplied if p.spec.role is not ParamRole.EXPERTS)
    experts = sum(math.prod(p.spec.shape[1:]) for p in multiplied if p.spec.role is ParamRole.EXPERTS)
    assert sum(count * p.shape.out * p.shape.inner for p, count in products.items()) == dense + experts
    assert sum(count * p.operations for p, count in products.items()) == 2 * sum(p.multiplications for p in multiplied)
    logits = tokens * geometry.vocab * 4
    read = sum(count * p.size for p, count in products.items())
    assert read == pytest.approx(sum(p.read for p in multiplied) + logits, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "kind", "matrices"),
    [
        ("nemotron-dense", LayerKind.SSM, ("mixer.in_proj",)),
        ("nemotron-dense", LayerKind.ATTENTION, ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")),
        ("nemotron-dense", LayerKind.MLP, ("mixer.up_proj",)),
        ("nemotron-moe", LayerKind.MOE, ("mixer.fc1_latent_proj", "shared_experts.up_proj")),
        ("nemotron-moe", LayerKind.MOE, ("experts.up_proj",)),
        ("qwen-dense", LayerKind.SSM, tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "a", "b"))),
        ("qwen-dense", None, ("mlp.gate_proj", "mlp.up_proj")),
        ("qwen-moe", None, ("mlp.gate", "mlp.shared_expert_gate")),
        ("qwen-moe", None, ("experts.gate_proj", "experts.up_proj")),
    ],
)  # fmt: skip
def test_matrices_that_read_the_same_are_one_product_of_each_layer(
    name: str, kind: LayerKind | None, matrices: tuple[str, ...]
) -> None:
    """kind: the layers that have it; None: all of them."""
    geometry = geometry_of(name)
    layers = sum(kind in (None, layer) for layer in geometry.layers)
    assert layers and [n for p, n in products_of(geometry, 3).items() if p.matrices == matrices] == [layers]


def test_experts_multiply_as_many_rows_as_each_has_on_average() -> None:
    """Super's tokens choose 22 of 512 experts: four tokens 512 (1 - (490 / 512)^4) = 82.5 of them, and 256 tokens all,
    each by 11.
    """
    geometry = geometry_of("nemotron-3-super-120b-a12b-nvfp4")
    for tokens, batches, rows in ((1, 22, 1), (4, 82, 2), (256, 512, 11), (260, 512, 12)):
        experts = {p.shape for p in products_of(geometry, tokens) if p.matrices[0].startswith("experts.")}
        assert experts == {ProductShape(batches, rows, 2688, 1024), ProductShape(batches, rows, 1024, 2688)}


def test_a_shape_is_timed_once_and_by_the_quickest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of one batch rotates over matrices; the batches of another multiply with one."""
    one, several = ProductShape(1, 3, 8, 16), ProductShape(4, 2, 8, 16)
    timed: list[torch.Tensor] = []

    def seconds(run: Any, *_: Any) -> float:
        timed.append(run(0))
        return float(len(timed))

    monkeypatch.setattr(product_times, "_seconds", seconds)
    found = time_products([one, several, one], Ceilings(1e9, 1e9), torch.device("cpu"))
    assert found == {one: 1.0, several: 2.0} and [tuple(t.shape) for t in timed] == [(3, 8), (4, 2, 8)]
    ways = product_times._ways
    monkeypatch.setattr(product_times, "_ways", lambda *arguments: 2 * ways(*arguments))
    assert time_products([one], Ceilings(1e9, 1e9), torch.device("cpu")) == {one: 3.0}


def test_both_caches_share_what_is_timed_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 row and 2 tokens, and of 2 rows and 1 token, have the same products."""
    shapes: list[ProductShape] = []

    def times(wanted: Iterable[ProductShape], *_: Any) -> dict[ProductShape, float]:
        assert not shapes
        shapes.extend(wanted)
        return dict.fromkeys(shapes, 1e-3)

    monkeypatch.setattr(run, "time_products", times)
    model = step_model(str(CHECKPOINTS / "qwen-moe"), None, ActivationDtype.FLOAT32, torch.device("cpu"))
    cases = [
        StepCase(cache=cache, rows=2 // tokens, tokens=tokens, accepted=1.0, context=40, replay=replay)
        for tokens in (1, 2) for cache in CACHES for replay in [ReplayConfig(window=4, max_step_tokens=tokens)]
    ]  # fmt: skip
    ceilings = run.with_shapes(model, cases, Ceilings(1e9, 1e9))
    products = products_of(model.geometry, 2)
    assert shapes == [product.shape for product in products]
    line = run.product_fields(model, cases, ceilings)
    assert [p["count"] for p in line["products"] if p["tokens"] == 2] == list(products.values())
    results = run.run_cases(model, cases, Schedule(warm_up=4, block=4, rounds=1), ceilings, profiled=lambda _: False)
    parts = [1e-6 * r.shape_bound_us - (r.floor.total - r.floor.weights - r.floor.logits) / 1e9 for r in results]
    assert len(parts) == 4 and parts == pytest.approx([parts[0]] * 4)


def test_bursts_have_pauses_and_an_untimed_one_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of the device's clock, here of a host whose runs take 1, 2, 3, ... seconds."""
    clock = {"now": 0.0, "runs": 0}
    pauses: list[float] = []

    def work() -> None:
        clock["runs"] += 1
        clock["now"] += clock["runs"]

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    assert measure.time_bursts(work, torch.device("cpu"), bursts=3, rest=5.0) == pytest.approx(4e6)
    assert pauses == pytest.approx([10.0, 20.0, 30.0])
