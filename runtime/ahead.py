"""The device's side of an engine's decode loop over a session, where it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.runtime.options import MTPDecodingConfig, NGramDecodingConfig, SpeculativeConfig
from trtllm_replayssm.runtime.session.base import Session

if TYPE_CHECKING:  # torch is imported when a session was made, not before
    from trtllm_replayssm.runtime.device.ports import DraftPort
    from trtllm_replayssm.runtime.device.steps import DeviceSteps
    from trtllm_replayssm.runtime.device_loop import Steps
    from trtllm_replayssm.runtime.session.torch_session import TorchSession


def steps_ahead(
    session: Session, speculative: SpeculativeConfig | None, *, wanted: bool | None, keeps_ends: bool
) -> Steps | None:
    """What runs decode steps one ahead of the host; None for the host's own path, which is the reference.

    wanted: None: where the session records its steps, on a GPU. keeps_ends: states at the end of answers are kept for
    next turns, which needs the hidden states that a drafting head continues from on the host. Raises UnsupportedError
    where it is wanted and cannot be.
    """
    from trtllm_replayssm.runtime.session.shared_session import SharedSession
    from trtllm_replayssm.runtime.session.torch_session import TorchSession
    from trtllm_replayssm.runtime.shared_steps import SharedSteps

    own = session.own if isinstance(session, SharedSession) else session
    obstacle = None
    if not isinstance(own, TorchSession):
        obstacle = "a session of another kind"
    elif keeps_ends and isinstance(speculative, MTPDecodingConfig):
        obstacle = "MTP drafts with reuse_outputs"
    if wanted and obstacle is not None:
        raise UnsupportedError("LLM", "device_loop", expected="false or nothing", got=f"true with {obstacle}")
    if obstacle is not None or not isinstance(own, TorchSession):
        return None
    if wanted is False or (wanted is None and not own.recorded.sizes):
        return None
    return SharedSteps(session, _steps, speculative) if isinstance(session, SharedSession) else _steps(own, speculative)


def _steps(session: TorchSession, speculative: SpeculativeConfig | None) -> DeviceSteps:
    from trtllm_replayssm.runtime.device.steps import DeviceSteps
    from trtllm_replayssm.runtime.session.graph_sizes import batch_sizes

    return DeviceSteps(
        session.static_step,
        session.graphs,
        _drafter(session, speculative),
        slots=session.pool.slots,
        buckets=sorted({*(session.recorded.sizes or batch_sizes(session.pool.slots)), session.pool.slots}),
        recorded=session.recorded.sizes,
        device=session.pools.cursors.position.device,
        vocab=session.geometry.vocab,
        rows_for=session.rows_for,
    )


def _drafter(session: TorchSession, speculative: SpeculativeConfig | None) -> DraftPort | None:
    from trtllm_replayssm.runtime.device.head_drafts import HeadDrafts
    from trtllm_replayssm.runtime.device.native_step import is_native
    from trtllm_replayssm.runtime.device.prompt_lookup import PromptLookup

    if speculative is None:
        return None
    if isinstance(speculative, NGramDecodingConfig):
        native = is_native(session.pools.cursors.position.device, session.geometry.vocab)
        sizes = (speculative.max_draft_len, speculative.max_matching_ngram_size, session.pool.max_seq_len)
        return PromptLookup(*sizes, native=native)
    return HeadDrafts(speculative.draft_len, draws=speculative.sample_drafts)
