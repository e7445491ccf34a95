"""What the tests of the routed experts share: random matrices, layers of them, and what the layers compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, Nvfp4Matrix

E4M3 = ml_dtypes.float8_e4m3fn


def random_matrix(rng: np.random.Generator, kind: str, rows: int, columns: int) -> Matrix:
    """Elements whose product with unit inputs has about unit size; NVFP4 scales over their whole range but the top."""
    size = 1.0 / np.sqrt(columns)
    if kind == "nvfp4":
        scales = rng.integers(0, 0x48, (rows, columns // 16), dtype=np.uint8).view(E4M3)
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        return Nvfp4Matrix(codes, scales, float(np.float32(size * rng.uniform(0.3, 1))))
    values = rng.standard_normal((rows, columns))
    if kind == "fp8":
        scale = rng.uniform(0.5, 1.5, (rows, 1)) if rows % 3 else np.asarray(1.0)
        return Fp8Matrix((values * 8).astype(E4M3), (scale * size / 8).astype(np.float32))
    return DenseMatrix((values * size).astype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class LayerCase:
    """experts of [inner, width] and back, top_k of them a token; gated: gate and up."""

    kind: str
    experts: int
    width: int
    inner: int
    top_k: int
    gated: bool
    tokens: int

    def __str__(self) -> str:
        names = f"{self.kind}-{self.experts}x{self.width}x{self.inner}-top{self.top_k}-{self.tokens}tokens"
        return names + "-gated" * self.gated


class Layer:
    """One layer's matrices and one step's inputs, on the host: float64 truth and the same formula in bfloat16."""

    def __init__(self, case: LayerCase, seed: int = 0) -> None:
        import torch

        rng = np.random.default_rng(seed)
        self.case = case
        parts = 1 + case.gated
        self.up = [
            tuple(random_matrix(rng, case.kind, case.inner, case.width) for _ in range(parts))
            for _ in range(case.experts)
        ]
        self.down = [(random_matrix(rng, case.kind, case.width, case.inner),) for _ in range(case.experts)]
        self.x = torch.from_numpy(rng.standard_normal((case.tokens, case.width))).to(torch.bfloat16)
        choices = [rng.permutation(case.experts)[: case.top_k] for _ in range(case.tokens)]
        self.ids = torch.from_numpy(np.array(choices, dtype=np.int32).reshape(case.tokens, case.top_k))
        self.weights = torch.from_numpy(rng.uniform(0.1, 1, (case.tokens, case.top_k)).astype(np.float32))

    def result(self, *, rounded: bool) -> Any:
        """[tokens, width] float64; rounded: to bfloat16 after every operation, as torch at that precision."""
        import torch

        def r(t: Any) -> Any:
            return t.to(torch.bfloat16).double() if rounded else t

        def matrix(m: Matrix) -> Any:
            return r(torch.from_numpy(m.dequantize(np.float64)))

        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for expert in range(self.case.experts):
            token, choice = torch.nonzero(self.ids == expert, as_tuple=True)
            first = [r(self.x[token].double() @ matrix(m).T) for m in self.up[expert]]
            if self.case.gated:
                inner = r(r(torch.nn.functional.silu(first[0])) * first[1])
            else:
                inner = r(torch.relu(first[0]).square())
            answer = r(inner @ matrix(self.down[expert][0]).T)
            out.index_add_(0, token, self.weights[token, choice, None].double() * answer)
        return r(out)
