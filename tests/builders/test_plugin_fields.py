"""The builder's list of plugin fields and inputs is the plugin library's own, read from its sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtllm_replayssm.bindings import COMMIT, CONV1D, GDN, MAMBA2, MOE, ROUTE, ssm_tensors
from trtllm_replayssm.builders.plugin_fields import (
    PLUGINS,
    REAL_FIELDS,
    ROUTER_CODES,
    STATE_FORMAT_CODES,
    WEIGHT_FORMAT_CODES,
    PluginSpec,
)
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.shapes import Router, SsmKind, SsmShape
from trtllm_replayssm.weights.expert_tensors import expert_tensors
from trtllm_replayssm.weights.matrix import MatrixFormat

SOURCES = Path(__file__).resolve().parents[2] / "plugins" / "trt"
FIELD = re.compile(r'visitor\.(?:integer|code|real)\("(\w+)"')
PORT = re.compile(r'\{"(\w+)", &A|(appendStepPorts)\(ports\)')
RECURRENCES = (MAMBA2, GDN)


def block(text: str, start: str) -> str:
    """From `start` to the closing brace at its own depth."""
    begin = text.index(start)
    depth, at = 0, text.index("{", begin)
    for i in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin : i + 1]
    raise AssertionError(f"no end of {start}")


@pytest.mark.parametrize("name", RECURRENCES)
def test_the_fields_of_a_recurrence_are_the_libraries(name: str) -> None:
    header = (SOURCES / "replay.h").read_text()
    common = FIELD.findall(block(header, "struct ReplayConfig"))
    own = FIELD.findall(block(header, f"struct {name} {{"))
    assert [*common, *own] == list(PLUGINS[name].all_fields)


@pytest.mark.parametrize("name", RECURRENCES)
def test_the_inputs_of_a_recurrence_are_the_libraries_in_order(name: str) -> None:
    source = (SOURCES / "replay.cpp").read_text()
    step = re.findall(r'\{"(\w+)", &A', block(source, "void appendStepPorts"))
    ports: list[str] = []
    for port, common in PORT.findall(block(source, f"{name}::ports")):
        ports += step if common else [port]
    spec: PluginSpec = PLUGINS[name]
    assert ports == [*spec.data, *spec.rows, *spec.cursors, *spec.weights]


@pytest.mark.parametrize(("name", "header"), [(CONV1D, "conv1d.h"), (COMMIT, "commit.h"), (ROUTE, "route.h")])
def test_the_other_plugins_have_the_libraries_fields_and_inputs(name: str, header: str) -> None:
    """State follows the weights: the window, or the cursors that a commit moves."""
    text = block((SOURCES / header).read_text(), f"struct {name} {{")
    spec = PLUGINS[name]
    assert FIELD.findall(text) == list(spec.all_fields)
    ports = re.findall(r'\{"(\w+)", &Args', block(text, "ports("))
    state = {CONV1D: ["window"], COMMIT: ["origin", "h", "cursor_position"], ROUTE: []}[name]
    assert ports == [*spec.data, *spec.rows, *spec.cursors, *spec.weights, *state]


@pytest.mark.parametrize(
    ("name", "header"), [(CONV1D, "conv1d.h"), (COMMIT, "commit.h"), (ROUTE, "route.h"), (MOE, "experts.h")]
)
def test_the_plugins_have_the_libraries_outputs_in_order(name: str, header: str) -> None:
    text = block((SOURCES / header).read_text(), f"struct {name} {{")
    assert re.findall(r'\{"(\w+)", &Args', block(text, "results(")) == list(PLUGINS[name].outputs)


def test_real_fields_are_the_libraries() -> None:
    texts = [path.read_text() for path in SOURCES.glob("*.h") if path.name != "fields.h"]  # that one explains
    assert {name for text in texts for name in re.findall(r'visitor\.real\("(\w+)"', text)} == set(REAL_FIELDS)


@pytest.mark.parametrize("fmt", [MatrixFormat.BF16, MatrixFormat.FP8, MatrixFormat.NVFP4])
def test_the_experts_have_the_libraries_fields_and_inputs(fmt: MatrixFormat) -> None:
    text = block((SOURCES / "experts.h").read_text(), f"struct {MOE} {{")
    spec = PLUGINS[MOE]
    assert FIELD.findall(text) == list(spec.all_fields)
    lines = block(text, "ports(").splitlines()
    if fmt is not MatrixFormat.NVFP4:
        lines = [line for line in lines if "if (scaled)" not in line]
    ports = re.findall(r'\{"(\w+)", &Args', "\n".join(lines))
    experts = [s.name.removeprefix("p.") for s in expert_tensors("p", fmt, 8, 64, 32, gated=True)]
    assert ports == [*spec.data, *spec.rows, *spec.weights, *experts]


@pytest.mark.parametrize("kind", SsmKind)
@pytest.mark.parametrize("recurrence", [StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8])
@pytest.mark.parametrize("read", [None, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4])
def test_state_tensors_come_in_the_libraries_order(
    kind: SsmKind, recurrence: StateFormat, read: StateFormat | None
) -> None:
    """The ports of every format pair, by the conditions in the library's own source."""
    text = block((SOURCES / "replay.cpp").read_text(), "void appendStatePorts")
    gdn = kind is SsmKind.GDN
    truth = {
        "config.recurrence == RSSM_FLOAT8_E4M3": recurrence is StateFormat.FP8,
        "config.read != RSSM_NO_DTYPE": read is not None,
        "config.read == RSSM_FLOAT8_E4M3": read is StateFormat.FP8,
        "config.read == RSSM_FLOAT4_E2M1": read is StateFormat.NVFP4,
        "gatedDeltaNet": gdn,
        "config.read != RSSM_NO_DTYPE || config.recurrence != RSSM_FLOAT32":
            read is not None or recurrence is not StateFormat.FLOAT32,
    }  # fmt: skip
    expected: list[str] = []
    open_conditions: list[bool] = []
    for line in text.splitlines()[3:]:
        condition = re.search(r"if \((.*)\) (?:\{|state)", line)
        holds = [*open_conditions, truth[condition[1]]] if condition else open_conditions
        port = re.search(r'state\("(\w+)"', line)
        if port and all(holds):
            expected.append(port[1])
        if condition and not port:
            open_conditions.append(truth[condition[1]])
        elif line.strip() == "}" and open_conditions:
            open_conditions.pop()
    shape = SsmShape(kind=kind, heads=4, groups=2, head_dim=16, state_dim=32, conv_kernel=4, conv_bias=False)
    specs = ssm_tensors(shape, ReplayConfig(recurrence=recurrence, read=read), 3, "bfloat16")
    assert [spec.name.removeprefix("layer.3.") for spec in specs] == expected


def test_codes_of_formats_are_those_of_the_native_headers() -> None:
    header = (SOURCES.parent / "include" / "replayssm" / "tensor.h").read_text()
    codes = {name: int(code) for name, code in re.findall(r"(RSSM_\w+) = (\d+)", header)}
    assert {
        None: codes["RSSM_NO_DTYPE"], StateFormat.FLOAT32: codes["RSSM_FLOAT32"],
        StateFormat.FLOAT16: codes["RSSM_FLOAT16"], StateFormat.FP8: codes["RSSM_FLOAT8_E4M3"],
        StateFormat.NVFP4: codes["RSSM_FLOAT4_E2M1"],
    } == STATE_FORMAT_CODES  # fmt: skip
    assert {
        MatrixFormat.BF16: codes["RSSM_BFLOAT16"], MatrixFormat.FP8: codes["RSSM_FLOAT8_E4M3"],
        MatrixFormat.NVFP4: codes["RSSM_FLOAT4_E2M1"],
    }.items() <= WEIGHT_FORMAT_CODES.items()  # fmt: skip
    routers = (SOURCES.parent / "include" / "replayssm" / "route.h").read_text()
    values = {name: int(code) for name, code in re.findall(r"(RSSM_ROUTER_\w+) = (\d+)", routers)}
    assert {
        Router.SOFTMAX: values["RSSM_ROUTER_SOFTMAX"], Router.SIGMOID_BIAS: values["RSSM_ROUTER_SIGMOID"],
    } == ROUTER_CODES  # fmt: skip
