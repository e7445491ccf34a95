"""What a JSON schema asks and its compiler would read over: refused by name, so that a text fits or none comes.

xgrammar takes one reading of each schema and drops, mostly without a word, the keywords that this reading has no place
for. `tests/server/test_keywords.py` tries what remains against a validator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from trtllm_replayssm.errors import RequestError

_Schema = Mapping[str, Any]
# Keywords that restrict the text and that the compiler knows nothing of.
_UNKNOWN = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_HARMLESS_IF_FALSE = frozenset({"uniqueItems", "additionalItems"})
# The first of these decides what a schema means; beside it nothing else is read.
_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_STRING = ("pattern", "format", "minLength", "maxLength")
_OBJECT = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_RESTRICTING = (*_BOUNDS, "multipleOf", *(name for name in _STRING if name != "format"), *_OBJECT, *_ARRAY)
# A schema without a type is one of objects or arrays for the compiler when it has one of these.
_TELLING = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
# Where schemas stand inside a schema: alone, in a list, under names.
_ONE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_TYPES = 7
_MAX_TAGS = 8  # properties that are tried as the one that tells the schemas of a oneOf apart
# Characters that a pattern writes as themselves: by their number, by a letter, or plainly.
_CHARACTER = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([\\"ntrfv0c]))|(["\x00-\x1f])')
_ESCAPED = frozenset('"\\' + "".join(map(chr, range(0x20))))


def require_kept(schema: _Schema) -> None:
    """Raise RequestError, naming the keyword, when something in a schema would not be kept. Linear in its size."""
    seen: set[int] = set()
    todo: list[object] = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        _check(part, schema)
        todo.append(_target(part, schema))
        todo.extend(part.get(name) for name in _ONE)
        for name in _LISTS:
            todo.extend(_list(part, name))
        for name in _NAMED:
            todo.extend(_mapping(part, name).values())


def _list(part: _Schema, name: str) -> list[Any]:
    """The value of a keyword that is a list; what is none is for the compiler to refuse."""
    value = part.get(name)
    return value if isinstance(value, list) else []


def _mapping(part: _Schema, name: str) -> dict[str, Any]:
    value = part.get(name)
    return value if isinstance(value, dict) else {}


def _target(part: _Schema, root: _Schema) -> object:
    """What a reference (#/a/b) names; None without one, or where nothing is, which the compiler says."""
    reference = part.get("$ref")
    if not isinstance(reference, str):
        return None
    if not reference.startswith("#"):  # the compiler would take it for "anything"
        raise _refused("references within the schema (#...)", repr(reference[:100]))
    found: object = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and len(step) < 6 and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def _check(part: _Schema, root: _Schema) -> None:
    for name in _UNKNOWN:
        if name in part and not (part[name] is False and name in _HARMLESS_IF_FALSE):
            raise _refused(f"no {name}", "one with it")
    head = next((name for name in _HEADS if name in part), None)
    if head is None:
        _check_plain(part)
        return
    _alone(head, part, (*_HEADS, *_RESTRICTING))
    members = _members(head, part, root)
    if not members or (head == "allOf" and len(members) > 1):
        raise _refused("one schema in allOf" if head == "allOf" else f"something in {head}", f"{len(members)}")
    if head == "oneOf" and not _exclusive([_resolved(member, root) for member in members]):
        raise _refused("schemas in oneOf that differ by type or by a required constant (or anyOf)", "others")
    if "type" in part and not _types_of(head, members, root) <= _types(part):
        raise _refused(f"the types of {head} among those of the type beside it", "others, or none named")


def _members(head: str, part: _Schema, root: _Schema) -> list[Any]:
    """The schemas, or of const and enum the values, that a head stands for."""
    if head == "$ref":
        return [_target(part, root)]
    return [part[head]] if head == "const" else _list(part, head)


def _types_of(head: str, members: list[Any], root: _Schema) -> set[str]:
    """The types that members name; "" for a member that names none."""
    if head in ("const", "enum"):
        return {_OF_VALUES.get(type(value), "null") for value in members}
    return set().union(*(_types(_resolved(member, root)) or {""} for member in members))


def _resolved(member: object, root: _Schema) -> _Schema:
    """A member, or what it refers to; empty for what is no object."""
    found = _target(member, root) if isinstance(member, dict) and "$ref" in member else member
    return found if isinstance(found, dict) else {}


def _types(part: _Schema) -> set[str]:
    """What `type` names; a number may be an integer too. Nothing for a list longer than there are types."""
    kind = part.get("type")
    names = kind if isinstance(kind, list) else [kind]
    found = {name for name in names if isinstance(name, str)} if len(names) <= _TYPES else set()
    return found | {"integer"} if "number" in found else found


def _exclusive(members: list[_Schema]) -> bool:
    """Whether no text fits two of the schemas: they have no type in common, or a required constant differs."""
    types = [_types(member) for member in members]
    if len(members) == 1 or (all(types) and sum(map(len, types)) == len(set().union(*types))):
        return True
    names = [name for name in _list(members[0], "required") if isinstance(name, str)]
    return any(_tells_apart(name, members) for name in names[:_MAX_TAGS])


def _tells_apart(name: str, members: list[_Schema]) -> bool:
    seen: set[str] = set()
    for member in members:
        tag = _mapping(_mapping(member, "properties"), name)
        values = [tag["const"]] if "const" in tag else _list(tag, "enum")
        own = {value for value in values if isinstance(value, str)}
        if not own or len(own) != len(values) or name not in _list(member, "required") or own & seen:
            return False
        seen |= own
    return True


def _check_plain(part: _Schema) -> None:
    """A schema that says by its type what it means, or by keywords of objects or arrays."""
    kinds = _types(part) if "type" in part else set(_inferred(part))
    if not kinds and "type" in part:
        raise _refused("a type that has a name", "none")
    if not kinds:
        loose = next((name for name in _RESTRICTING if name in part), None)
        if loose is not None:
            raise _refused(f"a type beside {loose}", "none")
    for kind, check in (("string", _check_string), ("integer", _check_number), ("object", _check_object)):
        if kind in kinds:
            check(part)


def _inferred(part: _Schema) -> Iterator[str]:
    """The type of a schema that names none; nothing for one that may be anything."""
    yield from (kind for kind, names in _TELLING.items() if any(name in part for name in names))


def _check_string(part: _Schema) -> None:
    for name in ("pattern", "format"):
        if name in part:
            _alone(name, part, _STRING)
    _check_pattern(part.get("pattern"))


def _check_pattern(pattern: object) -> None:
    """The compiler lets a pattern's own characters stand in the text as they are, where JSON escapes some."""
    text = pattern if isinstance(pattern, str) else ""
    if "(?=" in text or "(?!" in text:
        raise _refused("patterns that do not look ahead", repr(text[:40]))
    for short, long, letter, plain in _CHARACTER.findall(text):
        if letter or plain or chr(int(short or long, 16)) in _ESCAPED:
            raise _refused("patterns of characters that JSON need not escape", repr(text[:40]))


def _check_number(part: _Schema) -> None:
    if "multipleOf" in part:
        _alone("multipleOf", part, _BOUNDS)
        if "number" in _types(part):
            raise _refused("multipleOf of integers", "of numbers")


def _check_object(part: _Schema) -> None:
    properties = _mapping(part, "properties")
    for name in _list(part, "required"):
        if isinstance(name, str) and name not in properties:
            raise _refused("required names among the properties", repr(name[:40]))
    for name in ("patternProperties", "propertyNames"):
        if name in part:
            _alone(name, part, _OBJECT)
    for pattern in _mapping(part, "patternProperties"):
        _check_pattern(pattern)


def _alone(name: str, part: _Schema, others: tuple[str, ...]) -> None:
    """Raise RequestError when one of the others stands beside a keyword."""
    beside = next((other for other in others if other in part and other != name), None)
    if beside is not None:
        raise _refused(f"{name} without {beside} beside it", "both")


def _refused(expected: str, got: str) -> RequestError:
    return RequestError("request", "response_format", expected=f"a JSON schema with {expected}", got=got)
