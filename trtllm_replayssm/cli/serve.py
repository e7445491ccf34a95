"""`trtllm-replayssm serve`: the OpenAI-compatible server, with trtllm-serve's flags and configuration file."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trtllm_replayssm
from trtllm_replayssm.checks import read_text
from trtllm_replayssm.cli.options import ACTIVATIONS
from trtllm_replayssm.errors import ConfigError, UnsupportedError

_LOG = logging.getLogger(__name__)


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP (OpenAI API)",
        description="Serve a checkpoint over HTTP with OpenAI's endpoints. Flags are named as trtllm-serve's.",
        epilog="Names may be written with underscores too, as trtllm-serve's are: --max_batch_size.",
    )
    parser.add_argument(
        "model", metavar="MODEL_OR_BUNDLE",
        help="checkpoint directory (config.json, *.safetensors, tokenizer.json), or a bundle of build (needs a GPU)",
    )  # fmt: skip
    _add_http(parser)
    group = parser.add_argument_group("engine (also as keys of --config)")
    group.add_argument("--max-batch-size", type=int, help="sequences at once (default 8, or what a GPU holds)")
    group.add_argument("--max-num-tokens", type=int, help="tokens of one engine step")
    group.add_argument("--max-seq-len", type=int, help="prompt and output tokens of one sequence")
    group.add_argument("--max-beam-width", type=int, help="only 1")
    group.add_argument("--tp-size", "--tensor-parallel-size", type=int, help="devices that share the model (default 1)")
    group.add_argument("--pp-size", "--pipeline-parallel-size", type=int, help="only 1")
    group.add_argument("--ep-size", "--moe-expert-parallel-size", type=int, help="only 1")
    group.add_argument(
        "--kv-cache-free-gpu-memory-fraction", "--free-gpu-memory-fraction",
        type=float, help="share of the free memory that slots may take (default 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--enable-chunked-prefill", action="store_true", default=None,
        help="accepted: prompts are always chunked",
    )  # fmt: skip
    group.add_argument("--backend", help="torch")
    group.add_argument("--tokenizer", help="directory or tokenizer.json (default: the checkpoint's)")
    group.add_argument("--dtype", choices=["auto", *ACTIVATIONS], help="of activations")
    group.add_argument("--device", help="cpu, cuda, cuda:0 (default cpu, also beside a GPU; of a bundle cuda)")
    group.add_argument("--plugin-library", metavar="FILE", help="of a bundle whose engines have plugins")
    group.add_argument("--kernel-cache", metavar="FILE", help="of a bundle for tensorrt_rtx: keeps compiled kernels")
    group.add_argument(
        "--config", "--extra-llm-api-options", metavar="FILE",
        help="YAML: kv_cache_config, speculative_config, cuda_graph_config, replayssm",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_http(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", default="localhost", help="address to listen on (default localhost)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    group.add_argument("--served-model-name", help="default: the directory's name")
    group.add_argument("--chat-template", metavar="FILE", help="instead of the checkpoint's own")
    group.add_argument("--api-key", help="asked of every request that generates or reads tokens")
    group.add_argument("--api-key-file", metavar="FILE", help="the same, not shown in process lists")
    group.add_argument("--max-queue-size", type=int, help="waiting choices before 429 (256)")
    group.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    try:
        from trtllm_replayssm.runtime.server.serve import require_address, serve
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "serve", "packages", expected="the packages of the server", got=f"no module {error.name}",
            hint="In a checkout: pip install -e '.[serve]'",
        ) from error  # fmt: skip
    from trtllm_replayssm.bundle_parts import bundle_parts
    from trtllm_replayssm.runtime.llm import LLM
    from trtllm_replayssm.runtime.server.launch import merge, read_yaml, resolve
    from trtllm_replayssm.runtime.server.settings import ServerSettings
    from trtllm_replayssm.runtime.text.chat_template import ChatTemplate, load_chat_template

    launch = resolve(merge({} if arguments.config is None else read_yaml(arguments.config), _flags(arguments)))
    settings = ServerSettings(
        model_name=arguments.served_model_name or Path(arguments.model).resolve().name,
        host=arguments.host,
        port=arguments.port,
        api_key=_api_key(arguments),
        log_level=arguments.log_level,
        limits=launch.limits,
    )
    if arguments.chat_template is not None:
        template: ChatTemplate | None = ChatTemplate(
            read_text("serve", "chat_template", arguments.chat_template)
        )
    else:
        template = load_chat_template(arguments.model)
    options = dict(launch.options)
    if bundle_parts(Path(arguments.model)):
        options.setdefault("device", "cuda")
    require_address(settings)
    with _logging(arguments.log_level):
        _LOG.info("device: %s", options.get("device", "cpu, as none is set (on a GPU: --device cuda)"))
        with LLM(arguments.model, **options) as llm:
            serve(llm, settings, template)
    return 0


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Flags under the keys of the configuration file; None where not given."""
    names = (
        "max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "tp_size", "pp_size", "ep_size",
        "enable_chunked_prefill", "backend", "tokenizer", "dtype",
    )  # fmt: skip
    flags: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    fraction, device, queue = arguments.kv_cache_free_gpu_memory_fraction, arguments.device, arguments.max_queue_size
    if fraction is not None:
        flags["kv_cache_config"] = {"free_gpu_memory_fraction": fraction}
    ours: dict[str, Any] = {} if device is None else {"device": device}
    for name in ("plugin_library", "kernel_cache"):
        if getattr(arguments, name) is not None:
            ours[name] = getattr(arguments, name)
    if queue is not None:
        ours["limits"] = {"max_queue_size": queue}
    return {**flags, "replayssm": ours or None}


def _api_key(arguments: argparse.Namespace) -> str | None:
    if arguments.api_key_file is None:
        return str(arguments.api_key) if arguments.api_key is not None else None
    if arguments.api_key is not None:
        raise ConfigError("serve", "api_key_file", expected="no --api_key beside it", got="both")
    return read_text("serve", "api_key_file", arguments.api_key_file).strip()


@contextmanager
def _logging(level: str) -> Iterator[None]:
    """The product's own messages on stderr from this level on, in the server's form."""
    logger, handler = logging.getLogger(trtllm_replayssm.__name__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
    before = logger.level
    logger.setLevel(level.upper())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
