"""Typed access to the keys of a config.json, with errors that name the key. Knows no model family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError

MAX_LAYERS = 4096  # of a network; checked before anything is built per layer
MAX_EXPERTS = 65536  # of a layer; likewise
_MAX_INTEGER = 2**31 - 1  # sizes are int32 in kernels and engines
_MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
_MIN_FLOAT32 = 2.0**-126  # smallest normal value
_MAX_DEPTH = 64  # nesting of a document; public files have 6 levels
_SHOWN = 200  # characters of a value in a message
_REQUIRED = object()


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; Infinity is a bare token or, from transformers 5, {"__float__": "Infinity"}."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_untag_float)
    except FileNotFoundError:
        raise ConfigError("load_json", str(path), expected="a JSON file", got="no such file") from None
    except RecursionError:
        raise _too_deep(path) from None
    except (OSError, ValueError) as error:
        raise ConfigError("load_json", str(path), expected="a readable JSON file", got=shown(error, str)) from error
    if not isinstance(value, dict):
        raise ConfigError("load_json", str(path), expected="a JSON object", got=type(value).__name__)
    _check_depth(path, value)
    return value


def _untag_float(value: dict[str, Any]) -> Any:
    if value.keys() != {"__float__"}:
        return value
    number = value["__float__"]
    if not isinstance(number, str):  # the spelling exists only for what JSON has no number for
        raise ConfigError("load_json", "__float__", expected="a string", got=type(number).__name__)
    return float(number)


def _check_depth(path: Path, document: dict[str, Any]) -> None:
    """Level by level: what is not deep can be compared, printed and written back without exhausting the stack."""
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
        if not level:
            return
    raise _too_deep(path)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError("load_json", str(path), expected=f"at most {_MAX_DEPTH} levels of nesting", got="more")


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """`value` as a message shows it: shortened, and by its type where it cannot be written out at all."""
    try:
        text = form(value)
    except (ValueError, RecursionError):  # an integer beyond the interpreter's digit limit; a structure too deep
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


class ConfigReader:
    """One JSON object. Methods take a key and its older spellings; spellings present together must agree.

    A key that is absent or null counts as missing: `default` is returned, or ConfigError raised when there is none.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys

    def error(self, key: str, expected: object, got: object, hint: str | None = None) -> ConfigError:
        """A ConfigError about `key`."""
        return ConfigError("parse_config", key, expected=expected, got=got, hint=hint)

    def raw(self, *spellings: str, default: Any = _REQUIRED) -> Any:
        """The value of the first spelling present."""
        present = [name for name in spellings if self.keys.get(name) is not None]
        if not present:
            if default is _REQUIRED:
                raise self.error(" / ".join(spellings), "a value", "no such key")
            return default
        value = self.keys[present[0]]
        for name in present[1:]:
            if self.keys[name] != value:
                expected = f"{present[0]} = {shown(value)}, another spelling of it"
                raise self.error(name, expected, shown(self.keys[name]))
        return value

    def _typed(self, spellings: Sequence[str], default: Any, expected: str, legal: Callable[[Any], bool]) -> Any:
        value = self.raw(*spellings, default=default)
        if value is default or legal(value):
            return value
        raise self.error(" / ".join(spellings), expected, shown(value))

    def integer(self, *spellings: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = _MAX_INTEGER) -> Any:
        """An int in minimum..maximum."""
        return self._typed(spellings, default, f"an integer in {minimum}..{maximum}",
                           lambda v: is_int(v) and minimum <= v <= maximum)  # fmt: skip

    def number(self, *spellings: str, default: Any = _REQUIRED, maximum: float = _MAX_FLOAT32) -> Any:
        """A positive float of at most `maximum`, normal in float32, the type that every equation reads it in."""
        value = self._typed(
            spellings, default, f"a positive number in {_MIN_FLOAT32:.3g}..{maximum:.3g}",
            lambda v: (is_int(v) or isinstance(v, float)) and _MIN_FLOAT32 <= v <= maximum,
        )  # fmt: skip
        return value if value is default else float(value)

    def boolean(self, *spellings: str, default: Any = _REQUIRED) -> Any:
        """true or false."""
        return self._typed(spellings, default, "true or false", lambda v: isinstance(v, bool))

    def string(self, *spellings: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        return self._typed(spellings, default, "a string", lambda v: isinstance(v, str))

    def strings(self, *spellings: str, default: Any = _REQUIRED) -> Any:
        """A non-empty list of strings."""
        return self._typed(spellings, default, "a non-empty list of strings", _is_string_list)

    def only(self, *spellings: str, allowed: Sequence[object], hint: str | None = None) -> None:
        """Missing, or one of `allowed`: for keys whose other values this package does not implement."""
        value = self.raw(*spellings, default=None)
        # `True == 1` in Python, so that the types are compared too
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.error(" / ".join(spellings), f"absent or one of {list(allowed)}", shown(value), hint)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """Token ids written as one integer or as a list; () when missing."""
        value = self.raw(key, default=[])
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not (is_int(token) and 0 <= token < vocab):
                raise self.error(key, f"token ids in 0..{vocab - 1}", shown(token))
        return tuple(ids)

    def token_id(self, key: str, vocab: int) -> int | None:
        """One token id, or None when missing."""
        ids = self.token_ids(key, vocab)
        if len(ids) > 1:
            raise self.error(key, "one token id", shown(list(ids)))
        return ids[0] if ids else None


def is_int(value: object) -> bool:
    """Whether `value` is an integer and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(s, str) for s in value)
