"""LLM: load a checkpoint, generate text. Names after TensorRT-LLM's LLM API.

An engine runs in a background thread; every call here may come from any thread.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

from trtllm_replayssm.config import EVERY_BATCH, RANK_TIMEOUT, CudaGraphConfig, ReplayConfig
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.runtime.loop import EngineLoop
from trtllm_replayssm.runtime.options import (
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SpeculativeConfig,
)
from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_replayssm.runtime.progress import progress_bar
from trtllm_replayssm.runtime.replica import ReplicaOptions, build_engine
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.request import DEFAULT_PRIORITY
from trtllm_replayssm.runtime.stats import EngineLoad
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer
from trtllm_replayssm.shapes import ModelGeometry

__all__ = [
    "DEFAULT_PRIORITY", "LLM", "CompletionOutput", "CudaGraphConfig", "KvCacheConfig", "MTPDecodingConfig",
    "NGramDecodingConfig", "Prompt", "RequestHandle", "RequestOutput", "SamplingParams",
]  # fmt: skip

Prompt = str | Sequence[int] | Mapping[str, object]


class LLM:
    """A model that is ready to generate. Use as a context manager, or call `shutdown`."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: object = None,
        dtype: str = "auto",
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        prefill_chunk: int | None = None,
        speculative_config: SpeculativeConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        replay_config: ReplayConfig | None = None,
        state_cache: str = "replay",
        seed: int = 0,
        device: str = "cpu",
        backend: str = "torch",
        plugin_library: str | Path | None = None,
        kernel_cache: str | Path | None = None,
        cuda_graph_config: CudaGraphConfig | None = EVERY_BATCH,
        debug: bool = False,
        device_loop: bool | None = None,
        tensor_parallel_size: int = 1,
        rank_timeout: int = RANK_TIMEOUT,
    ) -> None:
        """Load `model`: a checkpoint directory, or a bundle of TensorRT engines, which needs a GPU. Raises ConfigError,
        CheckpointError and EngineMismatchError.

        tokenizer: a path or tokenizer; None: the checkpoint's. dtype: of activations, "auto" is float32 on a CPU and
        bfloat16 elsewhere. max_batch_size: sequences at once (8; on a GPU what fits, at most 256); max_seq_len: prompt
        and output tokens of one (the model's, at most 4096); max_num_tokens: tokens of one engine step (2048);
        prefill_chunk: tokens of one prompt chunk. replay_config: how recurrent state is kept; its max_step_tokens
        follows from the draft length.
        state_cache: "conventional" reads and writes the whole state at each step, for comparison. seed: for requests
        without one. plugin_library: of a bundle whose engines have plugins. kernel_cache: of a bundle for tensorrt_rtx,
        the file that keeps what was compiled for this GPU for the next start; of several ranks one each.
        cuda_graph_config: batch sizes to record on a GPU before the first request, None: none. debug: check all
        bookkeeping after each step. device_loop: sample, accept and draft on the device, one step ahead of the host,
        for requests that need no penalties, masks, log-probabilities or minimum length; None: on a GPU.
        tensor_parallel_size: devices that share the model's heads, experts and vocabulary, each in a process of its
        own; on a CPU as many processes. rank_timeout: seconds in which none of them gets further, after which a call
        fails and names the one that is behind.
        """
        options = ReplicaOptions(
            dtype=dtype, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len,
            prefill_chunk=prefill_chunk, speculative=speculative_config, kv_cache=kv_cache_config or KvCacheConfig(),
            replay=replay_config, state_cache=state_cache, seed=seed, device=device, backend=backend,
            plugin_library=plugin_library, kernel_cache=kernel_cache, cuda_graphs=cuda_graph_config, debug=debug,
            device_loop=device_loop, tensor_parallel_size=tensor_parallel_size, rank_timeout=rank_timeout,
        )  # fmt: skip
        self._start(build_engine(model, tokenizer, options))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that exists; the LLM's thread owns it from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine)
        # The thread holds the engine, not this object: closing follows its last reference, or the interpreter's end.
        self._closer = weakref.finalize(self, self._loop.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None when prompts are token ids."""
        return self._engine.intake.tokenizer

    @property
    def geometry(self) -> ModelGeometry:
        """The model's sizes."""
        return self._engine.session.geometry

    @property
    def max_seq_len(self) -> int:
        """Prompt and output tokens of one request at most."""
        return self._engine.intake.max_seq_len

    def stats(self) -> dict[str, object]:
        """Counters of the engine, see `EngineStats`."""
        return self._engine.stats.as_dict()

    def load(self) -> EngineLoad:
        """What the engine holds now, see `EngineLoad`."""
        return self._engine.load()

    @property
    def failure(self) -> BaseException | None:
        """What stopped the engine, None while it runs."""
        return self._loop.failure

    @overload
    def generate(
        self,
        inputs: str | Mapping[str, object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        use_tqdm: bool = ...,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        inputs: Sequence[int] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = ...,
        use_tqdm: bool = ...,
    ) -> RequestOutput | list[RequestOutput]: ...

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt (text, token ids, or {"prompt"} / {"prompt_token_ids"}) or a list of them.

        sampling_params: one for all or one each. use_tqdm: a progress bar on stderr when it is a terminal. Raises
        RequestError before anything runs when a prompt or setting is invalid.
        """
        single, prompts = _split(inputs)
        params = _params_for(sampling_params, len(prompts))
        requests = [self._loop.prepare(_plain(p), s) for p, s in zip(prompts, params, strict=True)]
        handles = [self._loop.start(request, streaming=False) for request in requests]
        try:
            with progress_bar(len(handles), shown=use_tqdm and sys.stderr.isatty()) as advance:
                results = []
                for handle in handles:
                    results.append(handle.result())
                    advance()
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        return results[0] if single else results

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        priority: float = DEFAULT_PRIORITY,
    ) -> RequestHandle:
        """Start one prompt; the handle can be awaited, iterated over (also asynchronously) and aborted.

        priority: 0..1; the higher one gets a slot first, if need be that of a running one, which goes on later.
        """
        request = self._loop.prepare(_plain(inputs), sampling_params or SamplingParams(), priority=priority)
        return self._loop.start(request, streaming=streaming)

    def export_request(self, request: RequestHandle, path: str | Path) -> None:
        """Write a running request to a file, from which `import_request` goes on; it goes on here too.

        Between two steps of the engine. Raises RequestError for one that has ended, UnsupportedError for one that
        follows a grammar, OSError.
        """
        self._loop.ask(lambda engine: engine.export_request(request.request_id, path))

    def import_request(self, path: str | Path, streaming: bool = False) -> RequestHandle:
        """Go on with a request of `export_request`, of this or another process with the same model and formats.

        Raises CheckpointError for a missing, damaged or inconsistent file, EngineMismatchError for one of another
        engine; nothing is queued then.
        """
        return self._loop.resume(path, streaming=streaming)

    def shutdown(self) -> None:
        """Cancel what runs, stop the engine's thread and the processes of further ranks. May be called twice."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _split(inputs: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """(whether it is one prompt, the prompts). A sequence that holds no number first is a list of prompts."""
    if isinstance(inputs, (str, bytes, bytearray, Mapping)):  # bytes are no ids; the engine says so
        return True, [inputs]
    try:
        items: list[object] = list(inputs)
    except TypeError as error:
        raise RequestError(
            "generate", "inputs", expected="text, token ids, or a list of them", got=repr(inputs)
        ) from error
    if items and not isinstance(items[0], (str, Mapping, Sequence)):
        return True, [items]  # type: ignore[list-item]  # token ids; the engine checks each
    return False, items  # type: ignore[return-value]  # prompts


def _plain(prompt: Prompt) -> str | Sequence[int]:
    """Text or token ids of a prompt that may be given as TensorRT-LLM's dictionaries."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) == 1:
        ((key, value),) = prompt.items()
        if (key == "prompt") is isinstance(value, str) and key in ("prompt", "prompt_token_ids"):
            return value  # type: ignore[return-value]  # ids of any library; the engine checks each
    raise RequestError(
        "generate",
        "inputs",
        expected='text, token ids, {"prompt": text} or {"prompt_token_ids": ids}',
        got=dict(prompt),
    )


def _params_for(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if isinstance(given, Mapping) or not all(isinstance(params, SamplingParams) for params in given):
        raise RequestError("generate", "sampling_params", expected="SamplingParams, or a list of them", got=repr(given))
    if len(given) != count:
        raise RequestError(
            "generate", "sampling_params", expected=f"one, or {count} (one per prompt)", got=f"{len(given)}"
        )
    return list(given)
