"""The weights that a network holds, decoded from its constants, are the checkpoint's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import Traced, trace_networks
from tests.builders.evaluator import decoded_weight
from tests.builders.quantised import TINY, mixed_checkpoint
from tests.session.sessions import CHECKPOINTS
from tests.weights.test_packing import read_back
from trtllm_replayssm.builders.flavour import CURRENT, FlavourName
from trtllm_replayssm.builders.memory import mapping_of, release_mapped
from trtllm_replayssm.builders.native_weights import write_native_weights
from trtllm_replayssm.builders.network import Constant
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.builders.quantised_parameters import DenseNvfp4Parameters
from trtllm_replayssm.builders.quantize_writer import Entry, SafetensorsWriter
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import EngineMismatchError, InvariantError, UnsupportedError
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.session.tensorrt_weights import BundleWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.names import split_expert_stack
from trtllm_replayssm.weights.packing import PackedMatrix
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile
from trtllm_replayssm.weights.shard import CheckpointShard
from trtllm_replayssm.weights.tensor_parallel import ALONE, TensorParallel

OPTIONS = BuildOptions(target="12.0", replay=ReplayConfig(window=8), max_seq_len=64, context_tokens=16)


def constants_of(traced: Traced) -> dict[str, Constant]:
    """Of all networks; a matrix that two networks hold is the same bytes."""
    found: dict[str, Constant] = {}
    for segment in traced.segments.values():
        found.update(segment.network.constants)
    return found


def dense_names(checkpoint: Checkpoint) -> list[str]:
    return [n for n in checkpoint.matrix_names() if checkpoint.spec(n).role is not ParamRole.EXPERTS]


def formats_bit_for_bit(
    constants: Mapping[str, Constant], source: Checkpoint | CheckpointShard, names: Iterable[str]
) -> set[MatrixFormat]:
    """Formats of the source's matrices, each of which the constants hold bit for bit."""
    formats = set()
    for name in names:
        stored = source.matrix(name)
        formats.add(stored.format)
        np.testing.assert_array_equal(decoded_weight(constants, name), stored.dequantize(), err_msg=name)
        if isinstance(stored, Nvfp4Matrix):
            assert constants[name].array.tobytes() == stored.packed.tobytes()
            scales = constants[name.removesuffix("weight") + "weight_scale"]
            assert scales.array.tobytes() == stored.block_scale.tobytes()
        elif isinstance(stored, Fp8Matrix):
            assert constants[name].array.tobytes() == stored.weight.tobytes()
    return formats


@pytest.mark.parametrize("name", TINY)
def test_every_matrix_is_in_a_network_bit_for_bit(name: str) -> None:
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        constants = constants_of(trace_networks(CheckpointParameters(checkpoint), OPTIONS))
        formats = formats_bit_for_bit(constants, checkpoint, dense_names(checkpoint))
    assert {MatrixFormat.NVFP4, MatrixFormat.FP8, MatrixFormat.BF16} <= formats


@pytest.mark.parametrize("name", ["nemotron-moe-tiny", "qwen3_5-moe-tiny"])
def test_experts_lie_beside_the_engines_with_their_own_bytes(name: str, tmp_path: Path) -> None:
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        parameters = CheckpointParameters(checkpoint)
        traced = trace_networks(parameters, OPTIONS)
        write_native_weights(tmp_path, traced.programs.values(), parameters, lambda _: None, packed=False)
        bundle = BundleWeights(tmp_path, checkpoint.geometry)
        stacks = [n for n in checkpoint.matrix_names() if checkpoint.spec(n).role is ParamRole.EXPERTS]
        assert stacks
        for stack in stacks:
            for expert in range(len(checkpoint.experts(stack))):
                ours, theirs = bundle.experts(stack).matrix(expert), checkpoint.experts(stack).matrix(expert)
                assert isinstance(ours, Nvfp4Matrix) and isinstance(theirs, Nvfp4Matrix)
                assert ours.packed.tobytes() == theirs.packed.tobytes()
                assert ours.block_scale.tobytes() == theirs.block_scale.tobytes()
                assert ours.scale_2 == theirs.scale_2


@pytest.mark.parametrize("parallel", [ALONE, TensorParallel(2, 0), TensorParallel(2, 1)], ids=str)
@pytest.mark.parametrize("name", ["nemotron-moe-tiny", "qwen3_5-moe-tiny"])
def test_experts_handed_to_plugins_are_the_checkpoints_bit_for_bit(
    name: str, parallel: TensorParallel, tmp_path: Path
) -> None:
    """Inputs of the network, no constants: mapped arrays of the declared sizes that decode to the stored values."""
    wanted = replace(
        OPTIONS, flavour=FlavourName.TENSORRT, target=CURRENT, tp_size=parallel.size, tp_rank=parallel.rank
    )
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        traced = trace_networks(CheckpointParameters(checkpoint), wanted)
        write_native_weights(tmp_path, traced.programs.values(), traced.parameters, lambda _: None, packed=True)
        share = BundleWeights(tmp_path, traced.parameters.geometry, parallel)
        handed = share.packed_experts(traced.programs.values())
        specs = {n: spec for program in traced.programs.values() for n, spec in program.tensors.items()}
        for tensor, array in handed.items():
            assert (array.dtype.name, array.shape) == (specs[tensor].dtype, specs[tensor].dims)
            assert mapping_of(array) is not None, "a view of the file"
        assert not handed.keys() & constants_of(traced).keys()
        stacks = [n for n in checkpoint.matrix_names() if checkpoint.spec(n).role is ParamRole.EXPERTS]
        assert stacks
        for stack in stacks:
            prefix, projection = split_expert_stack(stack)
            part, stored = "down" if projection == "down_proj" else "up", checkpoint.experts(stack)
            own = parallel.units(len(stored))
            assert len(handed[f"{prefix}.{part}"]) == len(own)
            for expert, number in enumerate(own):
                matrices = unpacked(handed, f"{prefix}.{part}", expert, stored)
                ours = matrices[-1 if projection == "up_proj" else 0]
                np.testing.assert_array_equal(ours, stored.matrix(number).dequantize(np.float64))


def unpacked(handed: dict[str, Any], name: str, expert: int, stored: ExpertStack) -> list[Any]:
    """The matrices of one expert, by the reader that follows the kernel."""
    scale, factor = handed.get(f"{name}_scale"), handed[f"{name}_factor"][expert]
    packed = PackedMatrix(
        stored.matrix(expert).format, *stored.shape[1:], handed[name][expert].view(np.uint8),
        None if scale is None else scale[expert].view(np.uint8), factor,
    )  # fmt: skip
    return [matrix[:, : stored.shape[2]] for matrix in read_back(packed, len(factor))]


class OneOther(CheckpointParameters):
    """Expert 1 of every stack in bfloat16."""

    def experts(self, name: str) -> ExpertStack:
        stack = super().experts(name)

        def read(expert: int) -> Matrix:
            matrix = stack.matrix(expert)
            return DenseMatrix(matrix.dequantize().astype(ml_dtypes.bfloat16)) if expert == 1 else matrix

        return ExpertStack(stack.shape, read)


def test_experts_of_two_formats_are_refused_for_plugins_and_no_file_passes_for_whole(tmp_path: Path) -> None:
    with Checkpoint.open(mixed_checkpoint("nemotron-moe-tiny")) as checkpoint:
        with pytest.raises(UnsupportedError, match=r"experts\.1: expected nvfp4.*got bf16"):
            write_native_weights(tmp_path, [], OneOther(checkpoint), lambda _: None, packed=True)
        traced = trace_networks(
            CheckpointParameters(checkpoint), replace(OPTIONS, flavour=FlavourName.TENSORRT, target=CURRENT)
        )
        for file in (tmp_path / "weights").iterdir():
            file.unlink()
        with pytest.raises(EngineMismatchError, match="Build the bundle again, with its weights"):
            BundleWeights(tmp_path, checkpoint.geometry).packed_experts(traced.programs.values())


def test_a_tensor_written_in_slices_is_whole_or_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "file", [Entry("a", "F32", (3, 2))], {})
    for index in (2, 0):
        writer.write_slice("a", index, np.full(2, index, dtype=np.float32))
    with pytest.raises(InvariantError, match="a: expected data"):
        writer.close()
    writer = SafetensorsWriter(tmp_path / "file", [Entry("a", "F32", (3, 2))], {})
    for index in (2, 0, 1):
        writer.write_slice("a", index, np.full(2, index, dtype=np.float32))
    writer.close()
    assert SafetensorsFile(tmp_path / "file").tensors["a"].array().tolist() == [[0, 0], [1, 1], [2, 2]]


def test_bf16_weights_are_the_dequantised_ones(tmp_path: Path) -> None:
    with Checkpoint.open(mixed_checkpoint("nemotron-moe-tiny")) as checkpoint:
        parameters = CheckpointParameters(checkpoint, dequantised=True)
        traced = trace_networks(parameters, OPTIONS)
        constants = constants_of(traced)
        for matrix in dense_names(checkpoint):
            expected = checkpoint.matrix(matrix).dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(decoded_weight(constants, matrix), expected, err_msg=matrix)
        assert not any(c.dtype in ("float4_e2m1", "float8_e4m3") for c in constants.values())
        write_native_weights(tmp_path, traced.programs.values(), parameters, lambda _: None, packed=False)
        stack = "backbone.layers.1.mixer.experts.up_proj"
        ours = BundleWeights(tmp_path, checkpoint.geometry).experts(stack).matrix(3)
        expected = checkpoint.experts(stack).matrix(3).dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours.dequantize(), expected)


def test_the_dense_nvfp4_choice_quantises_the_dense_layers_and_nothing_else() -> None:
    with Checkpoint.open(CHECKPOINTS / "qwen-moe") as checkpoint:
        parameters = DenseNvfp4Parameters(CheckpointParameters(checkpoint))
        constants = constants_of(trace_networks(parameters, OPTIONS))
        for matrix in dense_names(checkpoint):
            chosen = checkpoint.spec(matrix).recipe == "dense" and checkpoint.spec(matrix).shape[-1] % 16 == 0
            assert (constants[matrix].dtype == "float4_e2m1") == chosen, matrix
            if chosen:
                np.testing.assert_array_equal(
                    decoded_weight(constants, matrix), parameters.matrix(matrix).dequantize(), err_msg=matrix
                )


def test_dense_weights_are_the_mapped_bytes_and_can_be_let_go() -> None:
    """No copy of a BF16 matrix is made, and after `release_mapped` it is still readable."""
    with Checkpoint.open(CHECKPOINTS / "nemotron-dense") as checkpoint:
        constants = constants_of(trace_networks(CheckpointParameters(checkpoint), OPTIONS))
        array = constants["lm_head.weight"].array
        assert np.shares_memory(array, checkpoint.matrix("lm_head.weight").data)
        before = array.tobytes()
        release_mapped(constant.array for constant in constants.values())
        assert array.tobytes() == before and mapping_of(array) is not None
        assert mapping_of(np.zeros(3)) is None
