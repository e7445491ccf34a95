"""What the measured steps say together: replay against conventional, plain and speculative, equal and largest batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from trtllm_replayssm.bench.step.cases import CONVENTIONAL, EQUAL, LARGEST, REPLAY

Row = dict[str, Any]
_BOUNDS = (("bytes allow", "floor_ratio"), ("bounds", "bound_ratio"), ("at their shapes", "shape_bound_ratio"))


def ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """One JSON object per comparison that the rows of one model allow, in the order of the rows.

    plain and speculative: tokens a second, replay over conventional at the same batch and step length. largest: the
    same with as many rows as each side's memory holds. floor_ratio, bound_ratio, shape_bound_ratio: what the ratio
    would be at the floors and at the bounds of both sides. speculation over plain conventional: at the same batch.
    slot bytes: recurrent state of a slot, conventional over replay.
    """
    steps = [row for row in rows if row["what"] == "step"]
    table = {(r["role"], r["cache"], r["T"], r["B"] if r["role"] == EQUAL else 0): r for r in steps}
    for row in steps:
        if row["cache"] != REPLAY:
            continue
        largest = row["role"] == LARGEST
        rows_of = 0 if largest else row["B"]
        other = table.get((row["role"], CONVENTIONAL, row["T"], rows_of))
        kind = "plain" if row["T"] == 1 else "speculative"
        if other is not None:
            yield _ratio(f"{kind}, largest batch" if largest else kind, row, other)
            yield {
                **_common("slot bytes, conventional over replay", row),
                "ratio": round(other["state_bytes_per_slot"] / row["state_bytes_per_slot"], 3),
            }
        plain = table.get((EQUAL, CONVENTIONAL, 1, row["B"]))
        if row["T"] > 1 and not largest and plain is not None:
            yield _ratio("speculative replay over plain conventional", row, plain)


def _common(what: str, row: Row) -> Row:
    shared = ("model", "layers", "B", "T", "L", "accepted", "context")
    return {"what": "ratio", "row": what, **{name: row[name] for name in shared}}


def _ratio(what: str, row: Row, other: Row) -> Row:
    return {
        **_common(what, row), "conventional_B": other["B"], "us": row["us"], "conventional_us": other["us"],
        "tokens_per_s": row["tokens_per_s"], "conventional_tokens_per_s": other["tokens_per_s"],
        "ratio": round(row["tokens_per_s"] / other["tokens_per_s"], 3),
        "floor_ratio": round(_rate(row, "floor_us") / _rate(other, "floor_us"), 3),
        "bound_ratio": round(_rate(row, "bound_us") / _rate(other, "bound_us"), 3),
        "shape_bound_ratio": round(_rate(row, "shape_bound_us") / _rate(other, "shape_bound_us"), 3),
    }  # fmt: skip


def _rate(row: Row, time: str) -> float:
    """Tokens a second if the step took the time of that name."""
    return float(row["B"] * row["accepted"] / row[time])


def _product_lines(products: Sequence[Row]) -> Iterator[str]:
    for tokens, step in groupby(products, key=lambda product: product["tokens"]):
        found = (f"{p['count']} x {p['matrices'][0]} {p['us']:.1f} ({p['TFLOPs']:.0f})" for p in step)
        yield f"products of {tokens} tokens alone, us (TFLOP/s): {', '.join(found)}"


def line(row: Row) -> str:
    """A row for people; of products a line for each step length."""
    if row["what"] == "products":
        return "\n".join(_product_lines(row["products"]))
    if row["what"] == "ratio":
        bounds = ", ".join(f"{what} {row[name]:.3f}" for what, name in _BOUNDS if name in row)  # old files lack some
        times = f" ({bounds}), {row['conventional_us']:.1f} -> {row['us']:.1f} us" if "us" in row else ""
        return f"  {row['row']} B={row['B']} T={row['T']}: {row['ratio']:.3f}{times}"
    low, high = row["us_quartiles"]
    parts = ", ".join(f"{part} {us:.0f}" for part, us in row["breakdown_us"].items())
    return (
        f"{row['cache']:12} {row['role']:7} B={row['B']} T={row['T']} L={row['L']} a={row['accepted']:g}: "
        f"{row['us']:.1f} us ({low:.1f}-{high:.1f}), {row['tokens_per_s']:.0f} tokens/s, "
        f"{row['percent_of_floor']:.1f} % of the byte floor"
        + (f", {row['percent_of_bound']:.1f} % of the bound" if "percent_of_bound" in row else "")
        + (f", {row['percent_of_shape_bound']:.1f} % at its shapes" if "percent_of_shape_bound" in row else "")
        + (f" [{parts}]" if parts else "")
    )
