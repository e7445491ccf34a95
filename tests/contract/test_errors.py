"""Every error of the package carries and prints the five parts of its message, and survives a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from trtllm_replayssm import errors
from trtllm_replayssm.errors import ReplaySSMError

CLASSES = [c for _, c in sorted(vars(errors).items()) if isinstance(c, type) and issubclass(c, ReplaySSMError)]
BUILTIN_BASE = {
    "ConfigError": ValueError,
    "CheckpointError": ValueError,
    "ContractError": ValueError,
    "RequestError": ValueError,
    "UnsupportedError": NotImplementedError,
    "CapacityError": RuntimeError,
    "EngineMismatchError": RuntimeError,
    "DeviceError": RuntimeError,
    "InvariantError": AssertionError,
}


def make(kind: type[ReplaySSMError]) -> ReplaySSMError:
    """One error with five distinct parts."""
    return kind("ssm_update", "B", expected="[2, 3]", got="[2, 4]", hint="Transpose it")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_has_the_five_parts(kind: type[ReplaySSMError]) -> None:
    error = make(kind)
    assert (error.operation, error.argument, error.expected, error.got, error.hint) == (
        "ssm_update", "B", "[2, 3]", "[2, 4]", "Transpose it",
    )  # fmt: skip
    assert str(error) == "ssm_update: B: expected [2, 3], got [2, 4]. Transpose it"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_without_a_hint_ends_with_what_was_got(kind: type[ReplaySSMError]) -> None:
    assert str(kind("pool", "slots", expected=1, got=0)) == "pool: slots: expected 1, got 0"


@pytest.mark.parametrize("kind", CLASSES)
def test_no_part_but_the_hint_can_be_left_out(kind: type[ReplaySSMError]) -> None:
    with pytest.raises(TypeError):
        kind("pool", "slots", expected=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickle_and_copy(kind: type[ReplaySSMError]) -> None:
    for clone in (pickle.loads(pickle.dumps(make(kind))), copy.copy(make(kind))):
        assert type(clone) is kind
        assert (str(clone), vars(clone)) == (str(make(kind)), vars(make(kind)))


def test_every_error_is_also_the_builtin_that_callers_expect() -> None:
    own = {c.__name__: c for c in CLASSES if c is not ReplaySSMError}
    assert set(own) == set(BUILTIN_BASE)
    assert all(issubclass(own[name], base) for name, base in BUILTIN_BASE.items())
