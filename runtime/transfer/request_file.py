"""A request and its slots' states in one file: written by one engine, continued by another of the same signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.errors import CheckpointError, ContractError, EngineMismatchError
from trtllm_replayssm.runtime.scheduler.request import Request
from trtllm_replayssm.runtime.session.base import RawArray, Session, SlotSnapshot
from trtllm_replayssm.runtime.transfer import container
from trtllm_replayssm.runtime.transfer.document import describe, draft_arrays, draft_name
from trtllm_replayssm.runtime.transfer.parts import Part
from trtllm_replayssm.runtime.transfer.restore import Fit, rebuild


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """A request and, by choice, the state of those that had begun."""

    request: Request
    snapshots: Mapping[int, SlotSnapshot]


def write_request(path: str | Path, request: Request, snapshots: Mapping[int, SlotSnapshot], signature: str) -> None:
    """Write a request; snapshots: by choice. Raises UnsupportedError, or OSError when the file cannot be written."""
    arrays: dict[str, RawArray] = draft_arrays(request)
    for index, snapshot in snapshots.items():
        arrays |= {_state_name(index) + name: array for name, array in snapshot.arrays().items()}
    positions = {index: snapshot.position for index, snapshot in snapshots.items()}
    container.write(path, {"signature": signature, "request": describe(request, positions)}, arrays)


def read_request(path: str | Path, request_id: int, session: Session, fit: Fit) -> SavedRequest:
    """The request of a file, numbered request_id, checked against this session and the engine around it.

    Raises CheckpointError for a missing, damaged or inconsistent file and EngineMismatchError for one of another
    version, model, format or limit, RequestError for one with stop strings where there is no tokenizer; nothing of the
    session changes.
    """
    found = container.read(path)
    document = Part(found.document, str(path)).fields(("signature", "request"))
    signature = document["signature"].text()
    if signature != session.signature:
        raise EngineMismatchError(
            "import_request", str(path), expected=f"a request of {session.signature}", got=signature,
            hint="Continue it with the model, window and formats it was started with",
        )  # fmt: skip
    request, positions = rebuild(document["request"], found.arrays, request_id, fit)
    known = {draft_name(choice) for choice in request.choices if choice.draft.q is not None}
    snapshots = {}
    for index, position in positions.items():
        prefix = _state_name(index)
        arrays = {n.removeprefix(prefix): a for n, a in found.arrays.items() if n.startswith(prefix)}
        known |= {prefix + name for name in arrays}
        done = request.choices[index].prefilled == len(request.prompt_ids)
        try:
            snapshots[index] = session.load_snapshot(position, arrays, prompt_done=done)
        except (ContractError, KeyError, ValueError) as error:  # a state that does not fit although the signature does
            raise _damaged(path, "states of this session's shapes", error) from error
    strays = sorted(found.arrays.keys() - known)
    if strays:
        raise _damaged(path, "states of choices that have one", f"also {strays[:3]}")
    return SavedRequest(request, snapshots)


def _state_name(index: int) -> str:
    """What the names of a choice's state begin with."""
    return f"choice {index}/"


def _damaged(path: str | Path, expected: str, got: object) -> CheckpointError:
    return CheckpointError("import_request", str(path), expected=expected, got=got)
