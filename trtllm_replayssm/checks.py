"""Checks that several settings share: one clear error for a value of the wrong type or range, or an unreadable file."""

from __future__ import annotations

from pathlib import Path

from trtllm_replayssm.errors import ConfigError


def require_positive(operation: str, name: str, value: object, *, most: int | None = None) -> None:
    """Raise ConfigError unless value is an integer of at least 1 (and at most `most`); booleans are no integers."""
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= 1 and (most is None or value <= most)
    if not inside:
        expected = "a positive integer" if most is None else f"1..{most}"
        raise ConfigError(operation, name, expected=expected, got=repr(value))


def require_type(operation: str, name: str, value: object, *types: type) -> None:
    """Raise ConfigError unless value is an instance of one of the types; NoneType reads as None."""
    if not isinstance(value, types):
        names = " or ".join("None" if t is type(None) else t.__name__ for t in types)
        raise ConfigError(operation, name, expected=names, got=f"{type(value).__name__} {value!r}")


def read_text(operation: str, name: str, path: str | Path) -> str:
    """What a text file holds. Raises ConfigError for one that cannot be read or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "other bytes than UTF-8"
        raise ConfigError(operation, name, expected="a readable text file", got=f"{path}: {reason}") from error


def shown(value: object, most: int = 80) -> str:
    """repr for an error message: cut, and also for what cannot be printed, such as an integer of too many digits."""
    try:
        text = repr(value)
    except Exception as error:  # the value is a caller's
        return f"{type(value).__name__} ({type(error).__name__} when printed)"
    return text if len(text) <= most else f"{text[:most]}..."
