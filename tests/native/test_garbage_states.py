"""Slots, cursors and carries that do not exist do no harm to reset, clear, export, import and prompts.

Engine builders time candidates with uninitialised inputs. Behind the pool's slots, and around the carries, lies memory
that must neither be read nor written: NEAR ids point there, FAR ones nowhere. A row that names no slot, or a carry that
does not exist, does what a padding row does: expected is what the same call gives with -1 as its slot, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.test_prefill_formats import TOKENS, Layer, copies
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.stores import poisoned_store, same_bits, store_views
    from trtllm_replayssm.ops import _abi

POOL = 3  # slots a call is told of; a layer has five
NEAR, FAR = [POOL, POOL + 1], [2**31 - 1, -(2**31)]
IDS = pytest.mark.parametrize("ids", [NEAR, FAR], ids=["near", "far"])
CONFIGS = [(StateFormat.FLOAT32, None), (StateFormat.FLOAT16, StateFormat.FP8), (StateFormat.FP8, StateFormat.NVFP4)]
FORMATS = pytest.mark.parametrize(("recurrence", "read"), CONFIGS, ids=["float32", "float16-fp8", "fp8-nvfp4"])
KINDS = pytest.mark.parametrize(("kind", "head_dim"), [(SsmKind.MAMBA2, 64), (SsmKind.GDN, 128)], ids=["mamba2", "gdn"])


def int32(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def padded(slots: list[int]) -> list[int]:
    """The same rows, those beyond the pool as padding."""
    return [slot if 0 <= slot < POOL else -1 for slot in slots]


def of_the_pool(views: dict[str, Any]) -> dict[str, Any]:
    """The views, of the pool's slots only."""
    for view in views.values():
        view.shape[0] = POOL
    return views


def stored(layer: Layer) -> list[Any]:
    """All tensors of a layer, the slots behind the pool's included, as bytes."""
    tensors = [*copies(layer.state), *layer.state.ring_tensors(), layer.cursors.origin, layer.cursors.h]
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    assert [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)] == []


@IDS
def test_a_reset_of_no_slot_changes_nothing(library: _abi.Library, ids: list[int]) -> None:
    slots, seeds = int32([ids[0], 2, ids[1]]), torch.tensor([11, 12, 13], device="cuda")
    cursors = {name: torch.arange(1, 9, dtype=torch.int32, device="cuda") for name in ("origin", "h", "position")}
    cursors["seed"] = torch.arange(1, 9, device="cuda")
    expected = {name: tensor.clone() for name, tensor in cursors.items()}
    for name, tensor in expected.items():
        tensor[2] = 12 if name == "seed" else 0
    views = of_the_pool({name: harness.view(tensor) for name, tensor in cursors.items()})
    args = _abi.ResetSlotsArgs(slot=harness.view(slots), new_seed=harness.view(seeds), **views)
    library.reset_slots(args, harness.Pool._stream())
    torch.cuda.synchronize()
    assert_same(list(cursors.values()), list(expected.values()))


@FORMATS
@IDS
def test_clearing_no_slot_changes_nothing(
    library: _abi.Library, ids: list[int], recurrence: StateFormat, read: StateFormat | None
) -> None:
    shape = ssm_shape(SsmKind.MAMBA2, heads=2, groups=1, head_dim=64, state_dim=128)
    formats = {"checkpoint": recurrence, **({"read": read} if read else {})}
    stores = {name: poisoned_store(fmt, shape, slots=5) for name, fmt in formats.items()}
    expected = {name: poisoned_store(fmt, shape, slots=5) for name, fmt in formats.items()}
    for store in expected.values():
        store.clear(1)
    views = of_the_pool({field: v for name, store in stores.items() for field, v in store_views(name, store).items()})
    chosen = int32([ids[0], 1, ids[1]])
    library.clear_state(_abi.ClearStateArgs(slot=harness.view(chosen), **views), harness.Pool._stream())
    torch.cuda.synchronize()
    assert all(same_bits(stores[name], want) for name, want in expected.items())


def export(layer: Layer, slots: list[int]) -> Any:
    """[E, H, P, N]"""
    s, state = layer.shape, layer.state
    rings = {
        "ring_value": state.ring_value, "ring_k": state.ring_key, "ring_dt": state.ring_decay, "ring_v": state.ring_v,
        "ring_key_factor": state.ring_key_factor, "ring_beta": state.ring_beta,
    }  # fmt: skip
    pool = {name: tensor for name, tensor in rings.items() if tensor is not None}
    pool |= {"origin": layer.cursors.origin, "h": layer.cursors.h}
    views = {name: harness.view(tensor) for name, tensor in pool.items()} | store_views("checkpoint", state.checkpoint)
    out = torch.full((len(slots), s.heads, s.head_dim, s.state_dim), float("nan"), device="cuda")
    chosen = int32(slots)
    args = _abi.StateExportArgs(
        kind=int(_abi.Kind.GDN if layer.gdn else _abi.Kind.MAMBA2), window=layer.config.window,
        slot=harness.view(chosen), a=harness.view(layer.a), state=harness.view(out), **of_the_pool(views),
    )  # fmt: skip
    layer.native.state_export(args, harness.Pool._stream())
    torch.cuda.synchronize()
    return out


@FORMATS
@KINDS
@IDS
def test_an_export_of_no_slot_is_zero(
    library: _abi.Library, ids: list[int], kind: SsmKind, head_dim: int,
    recurrence: StateFormat, read: StateFormat | None,
) -> None:  # fmt: skip
    layer = Layer(library, kind, head_dim, 128, ReplayConfig(window=16, recurrence=recurrence, read=read))
    slots = [ids[0], 1, ids[1]]
    got = export(layer, slots)
    assert (got[[0, 2]] == 0).all()
    assert torch.equal(got.view(torch.int32), export(layer, padded(slots)).view(torch.int32))


@FORMATS
@KINDS
@pytest.mark.parametrize("where", ["near", "far"])
def test_an_export_stays_within_the_ring(
    library: _abi.Library, where: str, kind: SsmKind, head_dim: int, recurrence: StateFormat, read: StateFormat | None
) -> None:
    layer = Layer(library, kind, head_dim, 128, ReplayConfig(window=16, recurrence=recurrence, read=read))
    rows = layer.config.ring_rows
    for origin in (rows, 2 * rows + 1, -1, -3) if where == "near" else FAR:
        layer.cursors.origin[1] = origin
        got = export(layer, [1])
        layer.cursors.origin[1] = min(max(origin, 0), rows - 1)
        assert torch.equal(got.view(torch.int32), export(layer, [1]).view(torch.int32)), origin


@FORMATS
@IDS
def test_an_import_into_no_slot_changes_nothing(
    library: _abi.Library, ids: list[int], recurrence: StateFormat, read: StateFormat | None
) -> None:
    slots = [ids[0], 1, ids[1]]
    found = []
    for chosen in (slots, padded(slots)):
        layer = Layer(library, SsmKind.MAMBA2, 64, 128, ReplayConfig(window=16, recurrence=recurrence, read=read))
        s, state = layer.shape, layer.state
        views = store_views("checkpoint", state.checkpoint)
        if state.read_copy is not None:
            views |= store_views("read", state.read_copy)
        inputs = {
            "slot": int32(chosen), "position": int32([7, 8, 9]), "seed": torch.tensor([1, 2, 3], device="cuda"),
            "state": layer.normal(3, s.heads, s.head_dim, s.state_dim),
        }  # fmt: skip
        given = {name: harness.view(tensor) for name, tensor in inputs.items()}
        library.state_import(_abi.StateImportArgs(layer=1, **given, **of_the_pool(views)), harness.Pool._stream())
        torch.cuda.synchronize()
        found.append(stored(layer))
    assert_same(*found)


FROM, TO = 2, 4  # RSSM_PREFILL_FROM_CARRY, RSSM_PREFILL_TO_CARRY
CARRIED = {"from": FROM, "to": TO, "both": FROM | TO, "ones": -1, "garbage": 0x7F7F7F7F}


def prompt(layer: Layer, slots: list[int], flags: list[int], indices: list[int] | None) -> list[Any]:
    """What a chunk of four rows leaves: outputs, carries, what lies beside them, the layer. No indices: no carries."""
    s = layer.shape
    around = layer.normal(6, s.heads, s.head_dim, s.state_dim)  # -1, the three carries, 3 and 4
    carry = None if indices is None else around[1:4]
    index = int32(indices or [0] * 4)
    view = _abi.Tensor() if indices is None else harness.view(index)
    out = layer.run(slots, [TOKENS, 9, 33, TOKENS], flags, carry, carry_index=view)
    return [out.view(torch.int16), around.view(torch.int32), *stored(layer)]


@pytest.mark.parametrize("flag", CARRIED.values(), ids=CARRIED.keys())
@pytest.mark.parametrize("indices", [[3, 4, -1], [*FAR, 0x7F7F7F7F], None], ids=["near", "far", "null"])
@FORMATS
@KINDS
def test_a_prompt_row_whose_carry_does_not_exist_is_padding(
    library: _abi.Library, kind: SsmKind, head_dim: int, recurrence: StateFormat, read: StateFormat | None,
    indices: list[int] | None, flag: int,
) -> None:  # fmt: skip
    """Beside a row that leaves its state in carry 1, or in its slot where there are no carries."""
    found = []
    good = 0 if indices is None else TO
    for slots in ([2, 0, 1, 4], [2, -1, -1, -1]):
        layer = Layer(library, kind, head_dim, 128, ReplayConfig(window=16, recurrence=recurrence, read=read))
        found.append(prompt(layer, slots, [good, flag, flag, flag], None if indices is None else [1, *indices]))
    assert (found[0][0][1:] == 0).all()
    assert_same(*found)
