"""The exceptions of the package, and the one shape of their messages.

Every message names the operation, the argument, what was expected, what was got and (if there is
something to do) what to do. The native library reports the same causes as status codes.
"""

from __future__ import annotations


class ReplaySSMError(Exception):
    """Base of every error raised by this package."""

    def __init__(
        self,
        operation: str,
        argument: str,
        *,
        expected: object,
        got: object,
        hint: str | None = None,
    ) -> None:
        """operation: what was being done; argument: which input; hint: what the user can do."""
        self.operation = operation
        self.argument = argument
        self.expected = expected
        self.got = got
        self.hint = hint
        text = f"{operation}: {argument}: expected {expected}, got {got}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the message and restore the parts, so that errors cross process boundaries."""
        return _rebuild, (type(self), self.args), self.__dict__


class ConfigError(ReplaySSMError, ValueError):
    """A static setting is wrong; the user fixes it before starting."""


class CheckpointError(ReplaySSMError, ValueError):
    """A checkpoint's files are missing, damaged or do not fit the architecture."""


class ContractError(ReplaySSMError, ValueError):
    """A call breaks an operation's contract (shape, dtype, range); the caller fixes it."""


class UnsupportedError(ReplaySSMError, NotImplementedError):
    """A legal request that this build does not cover; the message lists what is covered."""


class CapacityError(ReplaySSMError, RuntimeError):
    """A pool or workspace is exhausted; a scheduler waits or preempts."""


class RequestError(ReplaySSMError, ValueError):
    """One request is invalid; the others go on."""


class EngineMismatchError(ReplaySSMError, RuntimeError):
    """Engine, manifest and library do not belong together; rebuild."""


class DeviceError(ReplaySSMError, RuntimeError):
    """A device call failed; the session stops."""


class InvariantError(ReplaySSMError, AssertionError):
    """Our own bookkeeping is broken: a bug in this package."""


def _rebuild(kind: type[ReplaySSMError], args: tuple[object, ...]) -> ReplaySSMError:
    error = kind.__new__(kind)
    error.args = args
    return error
