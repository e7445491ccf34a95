"""Acceptance of real engines, for a machine that has TensorRT and a GPU it runs on: one command,

    python -m pytest tests/tensorrt/test_acceptance.py

builds every tiny checkpoint for the GPU present, loads the bundle as a user does, and compares logits and 64 greedy
tokens with the torch session in the same activation type; speculative text with plain text; a second process with this
one; and the C++ example loads it and runs steps. Elsewhere it is skipped with one line. Set REPLAYSSM_PLUGIN_LIBRARY
for the flavour `tensorrt`, and for its C++ part REPLAYSSM_TENSORRT_INCLUDE_DIRS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.paths import require_model
from tests.tensorrt import plugin_host
from tests.tolerance import FACTOR
from trtllm_replayssm.builders.build import build
from trtllm_replayssm.builders.flavour import CURRENT, FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, PrefillChunk
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

TINY = ("nemotron-tiny", "nemotron-moe-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny")
REPLAY = ReplayConfig(window=16, max_step_tokens=4)
PROMPT = list(range(5, 41))
TEXT = 64
PLUGINS = os.environ.get("REPLAYSSM_PLUGIN_LIBRARY")


def unavailable(flavour: FlavourName) -> str | None:
    """Why engines of a flavour cannot run here; None when they can."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if find_spec(flavour.value) is None:
        return f"needs {flavour.value}"
    if flavour is FlavourName.RTX and torch.cuda.get_device_capability()[0] not in (8, 12):
        return "needs an RTX GPU"
    if flavour is FlavourName.TENSORRT and PLUGINS is None:
        return "needs REPLAYSSM_PLUGIN_LIBRARY"
    return None


PAIRS = [pytest.param((f, n), id=f"{f.value}-{n}") for f in FlavourName for n in TINY]
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(name of the checkpoint, bundle) of every flavour that runs here."""
    flavour, name = request.param
    reason = unavailable(flavour)
    if reason is not None:
        pytest.skip(reason)
    options = BuildOptions(
        flavour=flavour, target=CURRENT, replay=REPLAY, max_batch=4, max_seq_len=256, context_tokens=128
    )
    destination = tmp_path_factory.mktemp("bundles") / f"{flavour.value}-{name}"
    with checkpoint_source(require_model(name), options) as source:
        build(source.parameters, source.config, destination, options, plugin_library=PLUGINS)
    return name, destination


def open_bundle(path: Path) -> TensorRtSession:
    return TensorRtSession.from_bundle(path, plugin_library=PLUGINS)


def reference(checkpoint: Checkpoint, activation: ActivationDtype) -> TorchSession:
    return TorchSession.from_checkpoint(checkpoint, REPLAY, PoolConfig(slots=4, max_seq_len=256, activation=activation))


def forced(session: TorchSession, text: list[int]) -> Iterator[Logits]:
    """Logits of a given text after the prompt, one token a step."""
    slot = session.allocate(1)
    (last,) = session.prefill([PrefillChunk(slot, PROMPT, True)])
    assert last is not None
    yield last
    for token in text:
        (logits,) = session.decode([DecodeRow(slot, [token])])
        session.commit([1])
        yield logits[0]
    session.free(slot)


def greedy(session: TorchSession, width: int = 1) -> list[int]:
    """TEXT tokens, `width` a step: the base token and drafts that repeat the last token, mostly rejected."""
    slot = session.allocate(1)
    (last,) = session.prefill([PrefillChunk(slot, PROMPT, True)])
    assert last is not None
    text = [int(last.argmax())]
    while len(text) < TEXT:
        tokens = [text[-1]] * width
        (logits,) = session.decode([DecodeRow(slot, tokens)])
        chosen = [int(row.argmax()) for row in logits]
        count = next((i for i in range(1, width) if chosen[i - 1] != tokens[i]), width)
        session.commit([count])
        text += chosen[:count]
    session.free(slot)
    return text[:TEXT]


def test_logits_lose_no_more_than_the_torch_session_at_the_same_precision(bundle: tuple[str, Path]) -> None:
    name, path = bundle
    with Checkpoint.open(require_model(name)) as checkpoint:
        text = greedy(reference(checkpoint, ActivationDtype.FLOAT32))
        exact = [*forced(reference(checkpoint, ActivationDtype.FLOAT32), text)]
        fair = [*forced(reference(checkpoint, ActivationDtype.BFLOAT16), text)]
    ours = [*forced(open_bundle(path), text)]

    def error(got: list[Logits]) -> float:
        return float(np.sqrt(np.mean([np.square(x - y).mean() for x, y in zip(got, exact, strict=True)])))

    assert error(ours) <= FACTOR * error(fair)


def test_greedy_tokens_are_those_of_the_torch_session_where_it_is_sure(bundle: tuple[str, Path]) -> None:
    """Step by step along our own text; a token may differ only where the two best are closer than BF16 tells apart."""
    name, path = bundle
    text = greedy(open_bundle(path))
    with Checkpoint.open(require_model(name)) as checkpoint:
        logits = [*forced(reference(checkpoint, ActivationDtype.BFLOAT16), text)]
    for token, row in zip(text, logits, strict=False):
        assert row.max() - row[token] <= 2.0**-6 * np.abs(row).max(), (token, int(row.argmax()))


def test_speculative_text_is_the_plain_text(bundle: tuple[str, Path]) -> None:
    session = open_bundle(bundle[1])
    assert greedy(session, width=4) == greedy(session)


def test_recorded_steps_write_the_text_of_launched_ones(bundle: tuple[str, Path]) -> None:
    recorded = open_bundle(bundle[1])
    recorded.warm_up()
    launched = TensorRtSession.from_bundle(bundle[1], plugin_library=PLUGINS, cuda_graphs=None)
    for width in (1, 4):
        assert greedy(recorded, width) == greedy(launched, width)
    # what no kernel of ours serves is launched; where they serve, an engine that cannot be recorded is a failure
    if recorded.recorded.sizes:
        assert recorded.graphs.count > 0 == launched.graphs.count


def test_a_fresh_process_writes_the_same_text(bundle: tuple[str, Path]) -> None:
    code = (
        "import json, sys; from pathlib import Path; from tests.tensorrt.test_acceptance import greedy, open_bundle; "
        "print(json.dumps(greedy(open_bundle(Path(sys.argv[1])))))"
    )
    command = [sys.executable, "-c", code, str(bundle[1])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == greedy(open_bundle(bundle[1]))


def test_a_cpp_program_loads_the_bundle_and_runs_steps(bundle: tuple[str, Path], tmp_path: Path) -> None:
    build_of = read_manifest(bundle[1]).build
    if build_of.flavour != FlavourName.TENSORRT.value:
        pytest.skip("a bundle of tensorrt_rtx is run by the session, segment by segment")
    if (reason := plugin_host.unavailable()) is not None:
        pytest.skip(reason)
    major = int(build_of.tensorrt_version.split(".")[0])
    fitting = [version for version in plugin_host.headers() if version.major == major]
    if not fitting:
        pytest.skip(f"REPLAYSSM_TENSORRT_INCLUDE_DIRS names no headers of TensorRT {major}")
    binary = plugin_host.build_example(tmp_path, fitting[0])
    command = [binary, bundle[1], plugin_host.LIBRARY, plugin_host.loaded("libnvinfer"), "8"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 steps: median ")
