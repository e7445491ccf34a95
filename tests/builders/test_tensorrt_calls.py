"""The `tensorrt` flavour on a machine without it: every call of the builder exists in the recorded 11.4 bindings.

The builder runs whole, over a stand-in for the library that refuses what the real one does not offer
(`recorded_tensorrt`); the engine files it "compiles" are placeholders.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.quantised import TINY, mixed_checkpoint
from tests.builders.recorded_tensorrt import ENGINE, Recorded, RecordedTensorRt
from trtllm_replayssm.bindings import COMMIT, CONV1D, GDN, MAMBA2, MOE, ROUTE
from trtllm_replayssm.builders.build import BuildReport, build
from trtllm_replayssm.builders.flavour import CURRENT, FlavourName, load
from trtllm_replayssm.builders.inspect_bundle import summarise_bundle
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.plugin_fields import PLUGINS
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import SsmKind

REPLAY = ReplayConfig(window=8, max_step_tokens=4, read=StateFormat.NVFP4)
OPTIONS = BuildOptions(
    flavour=FlavourName.TENSORRT, target=CURRENT, replay=REPLAY, max_seq_len=64, context_tokens=16
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setitem(sys.modules, "tensorrt", RecordedTensorRt(found))  # type: ignore[arg-type]
    return found


def build_with_plugins(name: str, destination: Path) -> BuildReport:
    with checkpoint_source(mixed_checkpoint(name), OPTIONS) as source:
        return build(source.parameters, source.config, destination, OPTIONS, with_weights=False)


@pytest.mark.parametrize("name", TINY)
def test_every_call_of_a_build_exists_in_the_full_bindings(name: str, recorded: Recorded, tmp_path: Path) -> None:
    report = build_with_plugins(name, tmp_path / "bundle")
    geometry, programs = report.manifest.geometry, report.manifest.programs
    assert all(len(program.steps) == 1 for program in programs.values())
    assert (tmp_path / "bundle" / "rank0.engine").read_bytes() == ENGINE
    assert {p.name for p in (tmp_path / "bundle").glob("*.engine")} == {
        "rank0.engine" if n == "main" else f"rank0.{n}.engine" for n in programs
    }
    summary = summarise_bundle(tmp_path / "bundle")
    assert summary["programs"]["commit"] == {"engines": 1} and "cursor_position" in summary["bindings"]["main"]
    real_pass = recorded.calls[len(recorded.calls) // 2 :] if "mtp" not in programs else recorded.calls
    made = [call.plugin.name for call in real_pass]
    recurrence = MAMBA2 if geometry.ssm.kind is SsmKind.MAMBA2 else GDN
    for op in (recurrence, CONV1D):
        assert made.count(op) >= len(geometry.ssm_layers)
    assert made.count(COMMIT) == 1 and (MOE in made) == (geometry.moe is not None)
    assert made.count(ROUTE) == made.count(MOE)
    assert {("INetworkDefinition", "add_plugin_v3"), ("INetworkDefinition", "add_attention_v2")} <= recorded.used


def test_plugins_get_their_inputs_in_the_written_order(recorded: Recorded, tmp_path: Path) -> None:
    report = build_with_plugins("qwen3_5-tiny", tmp_path / "bundle")
    call = next(c for c in recorded.calls if c.plugin.name == GDN)
    spec, fields = PLUGINS[GDN], call.plugin.fields
    names = call.names
    shape = report.manifest.geometry.ssm
    assert names[0] == names[1] == names[2]  # q, k and v are ranges of one projection
    assert (fields["q_offset"], fields["k_offset"]) == (0, shape.key_channels)
    assert fields["v_offset"] == 2 * shape.key_channels
    after = names[len(spec.data) :]
    assert after[: len(spec.rows) + len(spec.cursors)] == [*spec.rows, *spec.cursors]
    parts = [name.removeprefix("layer.0.") for name in after[len(spec.rows) + len(spec.cursors) :]]
    assert parts == [
        "checkpoint", "read", "read_scale", "read_head_scale", "ring_value", "ring_k", "ring_dt", "ring_key_factor",
        "ring_v", "ring_beta", "carry",
    ]  # fmt: skip


def test_what_the_recorded_version_lacks_is_refused(recorded: Recorded) -> None:
    """The stand-in itself: without this the tests above could pass by checking nothing."""
    trt = RecordedTensorRt(recorded)
    builder = trt.Builder(type("Logger", (trt.ILogger,), {"log": lambda *_: None})())
    network = builder.create_network(1)
    x = network.add_input("x", trt.DataType.FLOAT, (-1, 4))
    with pytest.raises(AssertionError, match="not in tensorrt"):
        builder.create_network(1).set_compute_capability(0)
    with pytest.raises(AssertionError, match="recorded"):
        network.add_cast(x)
    with pytest.raises(AssertionError, match="recorded"):
        network.add_unary(x, trt.ElementWiseOperation.SUM)
    with pytest.raises(AssertionError, match="cannot be set"):
        network.add_identity(x).no_such_setting = 1
    with pytest.raises(AssertionError, match="not in the recorded"):
        _ = trt.BuilderFlag.FP16


def test_a_missing_plugin_library_is_one_clear_sentence(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.builders.recorded_tensorrt.NAMESPACE", "somebody else's")
    with pytest.raises(ConfigError, match="--plugin-library"):
        build_with_plugins("nemotron-tiny", tmp_path / "bundle")
    with pytest.raises(ConfigError, match="tensorrt builds for the GPU of this machine"):
        load(FlavourName.TENSORRT, "9.0")
