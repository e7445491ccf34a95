"""The matrix products of a step: what each multiplies with, its shape, and the least time that it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trtllm_replayssm.bench.step.floor import StepFloor, logits_bytes
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.session.joined_products import followers
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.sizes import StepParameter, chosen_share

# Beside `followers`: what a layer of experts multiplies with together (`TorchGraph._native_moe`)
_EXPERT_LAYER = {
    "gate": ("shared_expert_gate",),
    "fc1_latent_proj": ("shared_experts.gate_proj", "shared_experts.up_proj"),
}


class ProductShape(NamedTuple):
    """`batches` products of [rows, inner] with the transpose of [out, inner]."""

    batches: int
    rows: int
    out: int
    inner: int

    @property
    def operations(self) -> float:
        """Multiplications and additions, each counted."""
        return 2.0 * math.prod(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches: bytes a second of a large copy, operations a second of a large bfloat16 product, and
    seconds of single bfloat16 products by shape (`product_times`).
    """

    bandwidth: float
    products: float
    shapes: Mapping[ProductShape, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepProduct:
    """One product of a step, or one grouped product of a layer's routed experts.

    matrices: the last words of their names. size: bytes of the weights that it reads, and of the logits where it makes
    them. operations: what the tokens need; of experts `shape` has more, as all of its batches have equally many rows.
    """

    matrices: tuple[str, ...]
    shape: ProductShape
    size: float
    operations: float

    def least(self, ceilings: Ceilings) -> float:
        """Seconds: the longest of moving its bytes, multiplying at the large product's rate, and at its shape's."""
        shape_rate = self.shape.operations / ceilings.shapes[self.shape]
        return max(self.size / ceilings.bandwidth, self.operations / min(ceilings.products, shape_rate))

    def fields(self, ceilings: Ceilings) -> dict[str, Any]:
        """As a JSON object: us and TFLOPs as measured at the shape, bound_us the least time of `operations`."""
        seconds, shape = ceilings.shapes[self.shape], self.shape
        return {
            "matrices": list(self.matrices), "batches": shape.batches, "rows": shape.rows, "out": shape.out,
            "in": shape.inner, "us": round(seconds * 1e6, 2), "TFLOPs": round(shape.operations / seconds * 1e-12, 1),
            "bytes": round(self.size), "operations": round(self.operations),
            "bound_us": round(self.least(ceilings) * 1e6, 2),
        }  # fmt: skip


def step_products(
    geometry: ModelGeometry, parameters: Iterable[StepParameter], tokens: int
) -> Counter[StepProduct]:
    """The products of a step of `tokens` tokens, all rows', and how many of each it has.

    Matrices that read the same activations are one product, as in a session on a GPU. Sessions hold dense matrices in
    the activation type whatever a checkpoint's format, so their bytes are those of the product that is measured.
    """
    multiplied = {p.spec.name.removesuffix(".weight"): p for p in parameters if p.multiplications}
    others = {name: [other for other in _others(name) if other in multiplied] for name in multiplied}
    led = {other for names in others.values() for other in names}
    groups = [[name, *others[name]] for name in multiplied if name not in led]
    return Counter(_product(geometry, {name: multiplied[name] for name in group}, tokens) for group in groups)


def shape_bound(floor: StepFloor, products: Mapping[StepProduct, int], ceilings: Ceilings) -> float:
    """Seconds that a step takes at least when each product takes its `least` time, one after another, and all other
    bytes move at the bandwidth of a copy.
    """
    multiplying = sum(count * product.least(ceilings) for product, count in products.items())
    moved = sum(count * product.size for product, count in products.items())
    return multiplying + (floor.total - moved) / ceilings.bandwidth


def _others(name: str) -> Iterator[str]:
    """Matrices, where a model has them, that read what the matrix `name` reads; names without `.weight`."""
    prefix, _, last = name.rpartition(".")
    yield from (other.removesuffix(".weight") for other in followers(f"{name}.weight"))
    yield from (f"{prefix}.{other}" for other in _EXPERT_LAYER.get(last, ()))


def _product(geometry: ModelGeometry, joined: Mapping[str, StepParameter], tokens: int) -> StepProduct:
    first = next(iter(joined.values())).spec
    out, inner = sum(p.spec.shape[-2] for p in joined.values()), first.shape[-1]
    size = sum(p.read for p in joined.values())
    shape = ProductShape(1, tokens, out, inner)
    if first.role is ParamRole.EXPERTS:
        assert geometry.moe is not None
        chosen = geometry.moe.experts * chosen_share(geometry.moe, tokens)
        shape = ProductShape(round(chosen), math.ceil(tokens * geometry.moe.top_k / round(chosen)), out, inner)
    elif first.role is ParamRole.EMBEDDING:  # the output head, which writes the logits while it multiplies
        size += logits_bytes(geometry, tokens)
    matrices = tuple(".".join(name.split(".")[-2:]) for name in joined)
    return StepProduct(matrices, shape, size, 2.0 * sum(p.multiplications for p in joined.values()))
