"""A request and its slots' states in one file: written by one engine, continued by another of the same signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.errors import CheckpointError, ContractError, EngineMismatchError, RequestError
from trtllm_replayssm.runtime.scheduler.request import Request
from trtllm_replayssm.runtime.session.base import RawArray, Session, SlotSnapshot
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer
from trtllm_replayssm.runtime.transfer import container
from trtllm_replayssm.runtime.transfer.document import describe, draft_arrays, rebuild


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """A request and, by choice, the state of those that had begun."""

    request: Request
    snapshots: Mapping[int, SlotSnapshot]


def write_request(path: str | Path, request: Request, snapshots: Mapping[int, SlotSnapshot], signature: str) -> None:
    """Write a request; snapshots: by choice. Raises UnsupportedError, or OSError when the file cannot be written."""
    arrays: dict[str, RawArray] = draft_arrays(request)
    for index, snapshot in snapshots.items():
        arrays |= {f"choice {index}/{name}": array for name, array in snapshot.arrays().items()}
    positions = {str(index): snapshot.position for index, snapshot in snapshots.items()}
    document = {"signature": signature, "positions": positions, "request": describe(request)}
    container.write(path, document, arrays)


def read_request(path: str | Path, request_id: int, session: Session, tokenizer: Tokenizer | None) -> SavedRequest:
    """The request of a file, numbered request_id, checked against this session.

    Raises CheckpointError for a missing or damaged file and EngineMismatchError for one of another version, model,
    format or sequence limit, RequestError for one with stop strings where there is no tokenizer; nothing of the
    session changes.
    """
    found = container.read(path)
    try:
        signature = found.document["signature"]
        if signature != session.signature:
            raise EngineMismatchError(
                "import_request", str(path), expected=f"a request of {session.signature}", got=signature,
                hint="Continue it with the model, window and formats it was started with",
            )  # fmt: skip
        request = rebuild(found.document["request"], found.arrays, request_id, tokenizer)
        _require_room(path, request, session)
        snapshots = {}
        for choice in request.choices:
            position = found.document["positions"].get(str(choice.index))
            if position is None:
                continue
            absorbed = choice.prefilled + max(len(choice.output.token_ids) - 1, 0)
            if position != absorbed:
                raise _damaged(path, f"{absorbed} tokens absorbed by choice {choice.index}", position)
            prefix = f"choice {choice.index}/"
            arrays = {n.removeprefix(prefix): a for n, a in found.arrays.items() if n.startswith(prefix)}
            snapshots[choice.index] = session.load_snapshot(position, arrays)
    except ContractError as error:  # a state that does not fit although the signature does
        raise _damaged(path, "states of this session's shapes", error) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path, "a request", f"{type(error).__name__}: {error}") from error
    if request.params.stops and tokenizer is None:
        raise RequestError("import_request", "stop", expected="stop_token_ids (there is no tokenizer)", got="strings")
    return SavedRequest(request, snapshots)


def _require_room(path: str | Path, request: Request, session: Session) -> None:
    longest = len(request.prompt_ids) + request.rules.limit
    if longest > session.pool.max_seq_len or request.params.n > session.pool.slots:
        raise EngineMismatchError(
            "import_request", str(path),
            expected=f"at most max_seq_len = {session.pool.max_seq_len} tokens and {session.pool.slots} choices",
            got=f"{longest} tokens and {request.params.n} choices",
        )  # fmt: skip


def _damaged(path: str | Path, expected: str, got: object) -> CheckpointError:
    return CheckpointError("import_request", str(path), expected=expected, got=got)
