"""Whether an engine's settings fit its session, and how much memory one of its slots takes."""

from __future__ import annotations

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.spec.traffic import SlotBytes, conventional_slot_bytes
from trtllm_replayssm.spec.traffic import slot_bytes as replay_slot_bytes


def session_slot_bytes(session: Session, *, conventional: bool) -> SlotBytes:
    """Device memory of one slot by kind. conventional: the session keeps its states that way."""
    geometry, replay, pool = session.geometry, session.replay, session.pool
    if conventional:
        return conventional_slot_bytes(geometry, replay.recurrence, replay.max_step_tokens, pool)
    return replay_slot_bytes(geometry, replay, pool)


def require_session_fit(session: Session, max_batch_size: int, step_tokens: int) -> None:
    """Raise ConfigError for more rows than the session has slots, or more tokens of a row than its steps hold."""
    slots, widest = session.pool.slots, session.replay.max_step_tokens
    if max_batch_size > slots:
        raise ConfigError(
            "Engine",
            "max_batch_size",
            expected=f"at most the pool's slots = {slots}",
            got=max_batch_size,
            hint="Lower max_batch_size or give the pool more slots",
        )
    if step_tokens > widest:
        raise ConfigError(
            "Engine",
            "drafter",
            expected=f"1 + draft length <= max_step_tokens = {widest}",
            got=f"1 + {step_tokens - 1} = {step_tokens}",
            hint="Draft fewer tokens or raise ReplayConfig.max_step_tokens",
        )
