"""Tensor parallelism over heads, experts and vocabulary: what of a model's shapes and parameters one rank holds. Pure.

Every rank holds whole heads, groups, experts and channels (`params.Cut`). What is cut along its inputs gives partial
results, which the interpreter adds up over the ranks: once a mixer and once a feed-forward part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import Cut, Span
from trtllm_replayssm.shapes import AttentionShape, ModelGeometry, MoeShape, SsmShape


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """size: devices that share a model; rank: this one, 0..size - 1."""

    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                "TensorParallel", "rank", expected="size >= 1 and 0 <= rank < size",
                got=f"rank {self.rank} of {self.size}",
            )  # fmt: skip

    def units(self, count: int) -> range:
        """This rank's consecutive share of `count` pieces; ranks share one where there are fewer pieces than ranks.

        Raises ConfigError where neither number divides the other.
        """
        if count % self.size == 0:
            share = count // self.size
            return range(self.rank * share, (self.rank + 1) * share)
        if self.size % count == 0:
            own = self.rank * count // self.size
            return range(own, own + 1)
        raise ConfigError(
            "tensor parallel", "size", expected=f"a number that divides {count} pieces, or a multiple of it",
            got=self.size, hint="Choose another tp_size",
        )  # fmt: skip

    def channels(self, span: Span) -> range:
        """This rank's channels of a span, counted from the span's first."""
        width = span.channels // span.units
        own = self.units(span.units)
        return range(own.start * width, own.stop * width)

    def slices(self, cut: Cut) -> list[slice]:
        """This rank's consecutive pieces along the axis of a cut, neighbours joined."""
        found: list[slice] = []
        start = 0
        for span in cut.spans:
            own = self.channels(span)
            piece = slice(start + own.start, start + own.stop)
            if found and found[-1].stop == piece.start:
                piece = slice(found.pop().start, piece.stop)
            found.append(piece)
            start += span.channels
        return found


ALONE = TensorParallel()  # one device holds the whole model


def shard_geometry(geometry: ModelGeometry, parallel: TensorParallel) -> ModelGeometry:
    """The shapes of one rank. Routers, embeddings and norms of whole tokens keep theirs; so does `moe.experts`, since
    every rank routes over all experts. Raises ConfigError naming the first size that the ranks cannot share evenly.
    """
    if parallel.size == 1:
        return geometry
    size = parallel.size
    moe = geometry.moe
    if moe is not None:
        _divide("moe experts", moe.experts, size)
        moe = _shard_moe(moe, size)
    _divide("vocabulary", geometry.vocab, size)
    return replace(
        geometry,
        ssm=_shard_ssm(geometry.ssm, parallel),
        attention=_shard_attention(geometry.attention, parallel),
        mlp_intermediate=_divide("mlp intermediate size", geometry.mlp_intermediate, size),
        moe=moe,
    )


def partial_results(geometry: ModelGeometry) -> frozenset[str]:
    """Names of the matrices whose results add up over the ranks."""
    specs = model_of(geometry).parameters(geometry)
    return frozenset(spec.name for spec in specs if spec.cut is not None and spec.cut.axis == 1)


def _shard_ssm(shape: SsmShape, parallel: TensorParallel) -> SsmShape:
    groups = _divide("recurrent key heads (groups)", shape.groups, parallel.size)
    heads = parallel.units(shape.heads)
    return replace(shape, heads=len(heads), groups=groups, first_head=heads.start)


def _shard_attention(shape: AttentionShape, parallel: TensorParallel) -> AttentionShape:
    heads = _divide("attention heads", shape.heads, parallel.size)
    return replace(shape, heads=heads, kv_heads=len(parallel.units(shape.kv_heads)))


def _shard_moe(shape: MoeShape, size: int) -> MoeShape:
    shared = _divide("shared expert intermediate size", shape.shared_intermediate, size)
    return replace(shape, shared_intermediate=shared)


def _divide(what: str, count: int, size: int) -> int:
    if count % size:
        raise ConfigError(
            "tensor parallel", "size", expected=f"a divisor of the {what}, {count}", got=size,
            hint="Choose a tp_size that divides it",
        )  # fmt: skip
    return count // size
