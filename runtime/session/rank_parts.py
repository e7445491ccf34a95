"""One rank's session and what was made over it: calls by name, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trtllm_replayssm.runtime.session.base import Session

MAKE = "make"
Maker = Callable[..., Any]
"""maker(session, *arguments) -> a part; sent to other processes, so it is a function of a module."""


class RankParts:
    """Calls are the session's methods, `NAME.METHOD` of a part, and `make` (name, maker, *arguments) of a part."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._parts: dict[str, Any] = {}

    def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What the method gives; a part itself stays here."""
        if method == MAKE:
            name, maker, *rest = arguments
            self._parts[name] = maker(self._session, *rest)
            return None
        part, _, name = method.rpartition(".")
        return getattr(self._parts[part] if part else self._session, name)(*arguments, **keywords)

    def part(self, name: str) -> Any:
        """What was made here under that name."""
        return self._parts[name]
