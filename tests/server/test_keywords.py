"""Response formats are kept or refused: what a grammar lets through fits its schema, as a validator sees it."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.server.scripted import byte_tokenizer
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.grammar import GrammarMask, Grammars
from trtllm_replayssm.runtime.server.keywords import require_kept
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes

SCHEMAS, SAMPLES, LONGEST = 400, 12, 120
END = 255  # a byte that no text has
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
INTEGER, STRING = {"type": "integer"}, {"type": "string"}

DROPPED: list[tuple[str, Any]] = [
    ("not", {"type": "string", "not": {"const": "a"}}),
    ("if", {"if": STRING, "then": {"const": "x"}}),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": STRING}),
    ("dependentRequired", {"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("allOf", {"allOf": [CAT, DOG]}),
    ("anyOf", {"anyOf": []}),
    ("enum", {"enum": []}),
    ("oneOf", {"oneOf": [INTEGER, {"type": "number"}]}),
    ("oneOf", {"oneOf": [CAT, {**DOG, "required": []}]}),
    ("oneOf", {"oneOf": [CAT, CAT]}),
    ("minimum", {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}),
    ("minLength", {"enum": ["a", "bc"], "minLength": 2}),
    ("properties", {"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}, DOG]}),
    ("anyOf", {"type": "string", "anyOf": [{"format": "date"}, {"format": "uuid"}]}),
    ("const", {"type": "string", "const": 1}),
    ("a type beside minimum", {"minimum": 3}),
    ("a type beside required", {"required": ["a"]}),
    ("a type that", {"type": []}),
    ("pattern", {"type": "string", "pattern": "^a+$", "maxLength": 2}),
    ("format", {"type": "string", "format": "date", "maxLength": 4}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 3}),
    ("required", {"type": "object", "required": ["a"], "additionalProperties": INTEGER}),
    ("patternProperties", {"type": "object", "properties": {"b": INTEGER}, "patternProperties": {"^b": STRING}}),
    ("propertyNames", {"type": "object", "properties": {"b": INTEGER}, "propertyNames": {"enum": ["a"]}}),
    *[("pattern", {"type": "string", "pattern": p}) for p in ('"', "\\\\", "\\n", "^\n", "\\x22", "\\u000a")],
    *[("look ahead", {"type": "string", "pattern": p}) for p in ("^(?!a).*$", "a(?=b)")],
    ("pattern", {"type": "object", "patternProperties": {'"': INTEGER}}),
    ("'http://x'", {"type": "object", "properties": {"default": {"$ref": "http://x"}}}),
    ("no not", {"$ref": "#/x/0", "x": [{"not": INTEGER}]}),
]
KEPT: list[Any] = [
    {"type": "object", "properties": dict.fromkeys(("not", "if", "contains", "enum", "$ref", "minimum"), INTEGER)},
    {"$ref": "#/$defs/pet", "description": "one", "$defs": {"pet": {"oneOf": [CAT, DOG], "discriminator": {}}}},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": CAT, "b": DOG}},
    {"type": ["string", "null"], "enum": ["a", None]}, {"type": "number", "const": 1},
    {"type": "object", "anyOf": [CAT, DOG]}, {"oneOf": [INTEGER, STRING, {"type": "null"}]},
    {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "Age"}, {"allOf": [{"$ref": "#"}]},
    {"type": "array", "items": STRING, "minItems": 2, "maxItems": 3, "uniqueItems": False},
    {"type": "array", "prefixItems": [INTEGER], "items": False}, {"type": "string", "format": "date-time"},
    {"type": "string", "minLength": 1, "maxLength": 5}, {"type": "integer", "multipleOf": 5, "nullable": True},
    {"const": {"not": 1, "$ref": "http://x"}}, {"type": "object", "examples": [{"if": 1}]}, {},
    {"type": "string", "pattern": "^[^a]\\s\\d.é\\u00e9$"}, {"properties": {"a": {}}, "required": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema"), DROPPED)
def test_what_the_compiler_would_read_over_is_refused_by_name(name: str, schema: Any) -> None:
    with pytest.raises(RequestError, match="response_format") as caught:
        require_kept(schema)
    assert name in str(caught.value)


@pytest.mark.parametrize("keyword", ["items", "additionalProperties", "anyOf", "prefixItems", "properties", "$defs"])
def test_schemas_are_looked_into(keyword: str) -> None:
    def around(found: Any) -> Any:
        inside = {"anyOf": [found], "prefixItems": [found], "properties": {"a": found}, "$defs": {"a": found}}
        return {"properties": {"b": {keyword: inside.get(keyword, found)}}}

    require_kept(around(STRING))
    with pytest.raises(RequestError, match="no not"):
        require_kept(around({"not": STRING}))


@pytest.mark.parametrize("schema", KEPT)
def test_ordinary_schemas_pass(schema: Any) -> None:
    require_kept(schema)


def test_keywords_with_values_of_any_type_raise_nothing_else() -> None:
    names = [*{name for _, schema in DROPPED for name in schema}, "discriminator", "type", "$defs", "prefixItems"]
    values = [None, True, False, 5, -1.5, "a", "#", "#/a/1", [], [1], [[1]], ["a", {}], {}, {"a": 1}, {"a": [None]}]
    for first in names:
        for second in names:
            for value in values:
                for other in (value, {"a": value}, [value], "#/type"):
                    try:
                        require_kept({first: value, second: other})
                    except RequestError:
                        continue


def test_the_work_is_linear_in_the_schema() -> None:
    members = [{"$ref": "#/$defs/a"}] * 2000
    names = ["a"] * 4000
    many = {"type": names, "properties": {"a": {"enum": names}}, "required": names}
    began = time.thread_time()  # other processes' work is not counted
    for head in ("anyOf", "oneOf"):
        with pytest.raises(RequestError):
            require_kept({head: members, "type": "object", "$defs": {"a": many}})
    assert time.thread_time() - began < 0.5


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("xgrammar", reason="needs xgrammar: pip install xgrammar")
    tokens = TokenBytes(byte_tokenizer())
    return Grammars(tokens, tokens.count, tokens.count, [token_of(tokens, END)])


def token_of(tokens: TokenBytes, byte: int) -> int:
    return next(i for i in range(tokens.count) if tokens.of(i) == bytes([byte]))


def text_of(mask: GrammarMask, rng: random.Random, bytes_of: dict[int, int]) -> bytes | None:
    """A text that the mask lets through, with a liking for structure; None for one that grows too long."""
    made = bytearray()
    while len(made) < LONGEST:
        allowed = mask.allowed(())
        assert allowed is not None
        ids = [int(i) for i in np.flatnonzero(allowed)]
        ends = [i for i in ids if bytes_of[i] == END]
        if ends and (len(ids) == 1 or rng.random() < 0.5):
            return bytes(made)
        likely = [i for i in ids if bytes_of[i] in b'"}],:01ab{[ tfn-\x07\t']
        token = rng.choice(likely if likely and rng.random() < 0.85 else [i for i in ids if i not in ends])
        mask.accept(token)
        made.append(bytes_of[token])
    return None


class OutsideError(Exception):
    """JSON that is right and that the validator's values cannot hold."""


def value_of(text: bytes) -> Any:
    """The value of a text, which must be JSON. Raises OutsideError: a name twice, a huge number, half a character."""

    def members(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found):
            raise OutsideError
        return dict(found)

    def number(digits: str) -> float:
        if math.isinf(float(digits)):
            raise OutsideError
        return float(digits)

    try:
        value = json.loads(text.decode(), object_pairs_hook=members, parse_float=number)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise OutsideError from error
    return value


def scalar(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["string", "number", "integer", "boolean", "null", "const", "enum", "any"])
    found: dict[str, Any] = {
        "const": {"const": rng.choice([1, "a", None, {"a": 1}])}, "any": {},
        "enum": {"enum": rng.sample([1, "a", None, 2.5, True, {"b": [1]}], 2)},
    }.get(kind, {"type": kind})  # fmt: skip
    keywords: dict[str, list[Any]] = {}
    if kind == "string":
        patterns = ["^a+$", "b", "^[01]{2}", "^(a|b)*$", "^.{2}$", "a.b", "\\d", "^\\W$"]
        keywords = {"minLength": [0, 1, 3], "maxLength": [4, 5], "pattern": patterns, "format": ["date", "email"]}
    elif kind in ("number", "integer"):
        keywords = {"minimum": [-3, 0, 2], "exclusiveMaximum": [12, 15.5], "multipleOf": [2, 5, 0.5]}
    return found | some(rng, keywords)


def some(rng: random.Random, keywords: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in keywords.items() if rng.random() < 0.3}


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of the keywords that are known here."""
    kind = "scalar" if depth > 2 else rng.choice(["scalar", "object", "object", "array", "several"])
    if kind == "scalar":
        return scalar(rng)

    def inner() -> dict[str, Any]:
        return schema_of(rng, depth + 1)

    if kind == "several":
        several = {rng.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(rng.randrange(1, 3))]}
        return several | (scalar(rng) if rng.random() < 0.3 else {})
    typed = {} if rng.random() < 0.15 else {"type": kind}
    if kind == "array":
        lengths = {"minItems": [0, 1, 2], "maxItems": [2, 3], "uniqueItems": [True, False]}
        return typed | some(rng, {**lengths, "items": [inner(), True, False], "prefixItems": [[inner()]]})
    names = {"required": [["a"], ["b"]], "minProperties": [0, 1], "maxProperties": [1, 2]}
    if rng.random() < 0.2:
        names |= {"patternProperties": [{"^a": inner()}], "propertyNames": [{"pattern": "^[ab]+$"}, {"maxLength": 2}]}
    open_ones = {"additionalProperties": [True, False, inner()], "unevaluatedProperties": [False, True]}
    return typed | {"properties": {"a": inner(), "b": inner()}} | some(rng, {**names, **open_ones})


def test_what_is_not_refused_is_kept(grammars: Grammars) -> None:
    validators = pytest.importorskip("jsonschema_rs")
    tokens, rng, outcomes = TokenBytes(byte_tokenizer()), random.Random(3), Counter[str]()
    bytes_of = {i: tokens.of(i)[0] for i in range(tokens.count)}
    for _ in range(SCHEMAS):
        schema = schema_of(rng)
        try:
            require_kept(schema)
            grammar = grammars.compile(json.dumps(schema))
        except RequestError:
            outcomes["refused"] += 1
            continue
        validator = validators.Draft202012Validator(schema)
        for _ in range(SAMPLES):
            text = text_of(grammars.mask(grammar), rng, bytes_of)
            if text is None:
                continue
            with suppress(OutsideError):
                assert validator.is_valid(value_of(text)), (schema, text)
                outcomes["fit"] += 1
    assert outcomes["fit"] > 1000 and SCHEMAS / 5 < outcomes["refused"] < SCHEMAS * 4 / 5, outcomes
