"""Which replica answers a request: the one that has seen its beginning, unless that one is overloaded. Pure functions.

Replicas are ranked for a key by rendezvous hashing: each key has an order of its own, equal on every router, and when a
replica goes or comes only the keys that it had, or gets, move.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

SESSION_HEADER = "x-session-id"
REPLICA_HEADER = "x-replica"
BEGINNING = 256  # characters or tokens of a prompt that make its key; a shorter one has no block to reuse anyway


def affinity_key(headers: Mapping[str, str], body: bytes) -> str:
    """What requests have in common that should meet on one replica; headers by lower-case name.

    The session that the client names, else the beginning of the prompt: later turns of a conversation begin as its
    first turn did, of a chat with the messages up to the user's first. A body that is no JSON object is its own key;
    the replica will refuse it.
    """
    session = headers.get(SESSION_HEADER)
    if session:
        return f"session {session}"
    try:
        fields = json.loads(body) if body else {}
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return f"body {blake2b(body, digest_size=8).hexdigest()}"
    return f"prompt {_beginning(fields)}"


def _beginning(fields: Mapping[str, Any]) -> str:
    for name in ("messages", "prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list) and name != "prompt":
            roles = [item.get("role") if isinstance(item, dict) else "user" for item in value]
            value = value[: roles.index("user") + 1] if "user" in roles else value
        if value is not None:
            return _text(value, BEGINNING)
    return ""


def _text(value: object, length: int) -> str:
    """The first `length` characters of texts in a prompt or a list of messages; token ids count one each."""
    if isinstance(value, str):
        return value[:length]
    if isinstance(value, dict):
        return _text([value.get("role"), value.get("content")], length)
    if isinstance(value, list):
        parts: list[str] = []
        for item in value[:length]:
            if length <= 0:
                break
            parts.append(_text(item, length))
            length -= len(parts[-1]) if isinstance(item, (str, dict, list)) else 1
        return "\n".join(parts)
    return str(value)


def rank(key: str, replicas: int) -> list[int]:
    """All replicas, the key's own first, then the ones that stand in for it, in order."""

    def weight(replica: int) -> bytes:
        return blake2b(f"{replica} {key}".encode(), digest_size=8).digest()

    return sorted(range(replicas), key=weight)


def choose(order: Sequence[int], loads: Sequence[int], capacity: int, slack: float = 1.25) -> int:
    """The first replica of `order` that is not overloaded, else the least loaded.

    loads: requests in each replica. One is overloaded when it has no free slot (capacity) and also more than `slack`
    times its share of all requests: a hit is worth waiting for a little, not behind everybody with the same prompt.
    """
    share = slack * (sum(loads) + 1) / len(loads)
    for replica in order:
        if loads[replica] < max(capacity, share):
            return replica
    return min(order, key=lambda replica: loads[replica])


async def limited_body(parts: AsyncIterator[bytes], limit: int) -> bytes | None:
    """A body from its parts, None as soon as it is longer than `limit` bytes; nothing is read after that."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit:
            return None
    return bytes(body)
