"""The stateful operations of a forward pass over the pools: recurrences, convolution windows and KV attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.ops.large_products import LargeProducts
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native import Convolution, NativeOps
from trtllm_replayssm.ops.native_layers import Rotation
from trtllm_replayssm.ops.native_prefill import NativePrefill
from trtllm_replayssm.ops.reference import commit, conv1d, flush, gdn, mamba2, prefill
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.decode_attention import attend_rows, decode_attention
from trtllm_replayssm.runtime.session.derived import DerivedTensors
from trtllm_replayssm.runtime.session.native_layers import NativeLayers
from trtllm_replayssm.runtime.session.native_ops import experts_wait
from trtllm_replayssm.runtime.session.native_prompts import NativePrompts
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext


class StateOps:
    """Dispatches on the phase and on the kind of state cache; tensors are [B, T, ...].

    native: the CUDA kernels of decode steps; None: the reference operations do everything.
    """

    def __init__(
        self, pools: StatePools, native: NativeOps | None = None, prompts: NativePrefill | None = None
    ) -> None:
        """prompts: the kernels for prompt chunks, where they serve the pools as well."""
        self._pools = pools
        self._native = native
        self._prompts = None if prompts is None else NativePrompts(pools, prompts)
        self._waiting: Convolution | None = None
        self._rates: dict[int, Tensor] = {}
        self.derived = DerivedTensors()
        self._large = None if native is None else LargeProducts.on(pools.cursors.position.device)

    @property
    def native(self) -> NativeOps | None:
        """The kernels, where they serve the pools."""
        return self._native

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] weight [N, K]^T -> [..., N] in x's type."""
        if self._large is None or not self._large.serve(x, weight):
            product: Tensor = functional.linear(x, weight)
            return product
        return self._large.linear(x, weight)

    def linear_in_parts(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x [..., K] weight [N, K]^T as sums over shares of K, [parts, ..., N] float32; None: `linear` is as fast."""
        if self._large is None:
            return None
        count = self._large.parts_of(x, weight)
        return None if count == 1 else self._large.parts(x, weight, count)

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same in float32: of 16-bit types on a GPU the sums as they are, no rounding, no second pass over them."""
        if not x.is_cuda or x.dtype is torch.float32:
            plain: Tensor = functional.linear(x, weight).float()
            return plain
        if self._large is not None and self._large.serve(x, weight):
            return self._large.linear(x, weight, torch.float32)
        rows: Tensor = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return rows.view(*x.shape[:-1], -1)

    @property
    def experts_wait(self) -> bool:
        """Whether routed experts wait for the device in each pass."""
        return experts_wait(self._pools, self._native)

    @property
    def native_heads(self) -> bool:
        """Whether kernels serve everything around the recurrence, attention heads included."""
        if self._native is None or not self._pools.cursors.position.is_cuda:
            return False
        attention = self._pools.geometry.attention
        return NativeLayers.serves(attention.head_dim, attention.rotary_dim)

    def kv(self, layer: int) -> KvLayer:
        """The caches of an attention layer."""
        return self._pools.kv[layer]

    def rotation(self, rotary_dim: int, theta: float) -> Rotation:
        """The rotation of every position of a cache."""
        depth = next(iter(self._pools.kv.values())).keys.shape[2]
        return self.derived.rotation(depth, rotary_dim, theta, self._pools.cursors.position.device)

    @property
    def prompts(self) -> NativePrompts | None:
        """The kernels for prompt chunks, where they serve the pools."""
        return self._prompts

    def commit(self, rows: StepRows, accepted: Tensor) -> None:
        """Move the cursors of a decode step's rows; accepted [B], clamped to 0..num_tokens."""
        if self._native is None:
            move = commit.commit_conventional if self._pools.conventional else commit.commit
        else:
            move = self._native.commit_conventional if self._pools.conventional else self._native.commit
        move(self._pools.replay, self._pools.cursors, rows, accepted)

    def conv1d(self, ctx: StepContext, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """SiLU of the convolution over the layer's window, in x's type.

        HAZARD: with the kernels it runs together with the decay inputs of the same layer (`discretise`, `gates`); until
        then only views of the result may be taken.
        """
        window = self._pools.windows[layer]
        if self._native is None:
            return conv1d.conv1d_update(window, self._pools.cursors, ctx.rows, x, weight, bias).to(x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._waiting = Convolution(layer, window, x, weight[:, 0], bias, out, prompt=ctx.phase is Phase.PREFILL)
        return out

    def rates(self, layer: int, a_log: Tensor) -> Tensor:
        """Mamba-2: the layer's decay rates -exp(a_log), [H] float32, computed once."""
        if layer not in self._rates:
            self._rates[layer] = -a_log.exp()
        return self._rates[layer]

    def discretise(self, ctx: StepContext, layer: int, dt: Tensor, dt_bias: Tensor) -> Tensor:
        """Mamba-2: softplus(dt + dt_bias), [B, T, H] float32."""
        if self._native is None:
            return mamba2.discretise(dt, dt_bias)
        return self._inputs(ctx, layer, dt, None, dt_bias, None)[0]

    def gates(
        self, ctx: StepContext, layer: int, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """GDN: log-decay -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), [B, T, H] float32."""
        if self._native is None:
            return gdn.gates(a, b, a_log, dt_bias)
        return self._inputs(ctx, layer, a, b, dt_bias, a_log)

    def _inputs(
        self, ctx: StepContext, layer: int, decay: Tensor, beta: Tensor | None, dt_bias: Tensor, a_log: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the convolution that waits, with the decay inputs of its layer."""
        conv, self._waiting = self._waiting, None
        assert self._native is not None and conv is not None and conv.layer == layer, "a convolution comes first"
        cursors, shape = self._pools.cursors, self._pools.geometry.ssm
        return self._native.ssm_inputs(shape, conv, cursors, ctx.rows, decay, beta, dt_bias, a_log=a_log)

    def mamba2(
        self, ctx: StepContext, layer: int, x: Tensor, k: Tensor, q: Tensor, dt: Tensor, a: Tensor, d_skip: Tensor
    ) -> Tensor:
        """x [B, T, H, P], k, q [B, T, G, N], dt [B, T, H] float32 after softplus -> [B, T, H, P] in x's type."""
        state, cursors = self._pools.ssm[layer], self._pools.cursors
        if ctx.phase is Phase.DECODE:
            if self._native is not None:
                return self._native.mamba2_update(
                    state, cursors, ctx.rows, x, k, q, dt, a, d_skip=d_skip, settled=True
                )  # the embedding lies between the last commit and this; a whole step between a state's updates
            if isinstance(state, ConventionalLayerState):
                return mamba2.mamba2_conventional(state, cursors, ctx.rows, x, k, q, dt, a, d_skip=d_skip).to(x.dtype)
            return mamba2.mamba2_update(state, cursors, ctx.rows, x, k, q, dt, a, d_skip=d_skip).to(x.dtype)
        if self._prompts is not None:
            return self._prompts.scan(ctx, layer, {"value": x, "k": k, "q": q, "dt": dt, "a": a, "skip": d_skip})
        out = torch.zeros(x.shape, device=x.device)
        for row in ctx.rows.active.tolist():
            n = int(ctx.rows.num_tokens[row])
            initial = self._initial_state(ctx, layer, row, a)
            o, final = prefill.mamba2_scan(state.shape, initial, x[row, :n], k[row, :n], q[row, :n], dt[row, :n], a)
            out[row, :n] = o + d_skip[:, None] * x[row, :n].float()
            self._leave_state(ctx, layer, row, final)
        return out.to(x.dtype)

    def gdn(self, ctx: StepContext, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k [B, T, G, N], v [B, T, H, P], g, beta [B, T, H] float32 -> [B, T, H, P] in v's type."""
        state, cursors = self._pools.ssm[layer], self._pools.cursors
        if ctx.phase is Phase.DECODE:
            if self._native is not None:
                return self._native.gdn_update(state, cursors, ctx.rows, q, k, v, g, beta, settled=True)
            if isinstance(state, ConventionalLayerState):
                return gdn.gdn_conventional(state, cursors, ctx.rows, q, k, v, g, beta).to(v.dtype)
            return gdn.gdn_update(state, cursors, ctx.rows, q, k, v, g, beta).to(v.dtype)
        if self._prompts is not None:
            return self._prompts.scan(ctx, layer, {"value": v, "k": k, "q": q, "log_decay": g, "beta": beta})
        out = torch.zeros(v.shape, device=v.device)
        for row in ctx.rows.active.tolist():
            n = int(ctx.rows.num_tokens[row])
            initial = self._initial_state(ctx, layer, row, None)
            o, final = prefill.gdn_scan(
                state.shape, initial, q[row, :n], k[row, :n], v[row, :n], g[row, :n], beta[row, :n]
            )
            out[row, :n] = o
            self._leave_state(ctx, layer, row, final)
        return out.to(v.dtype)

    def attention(self, ctx: StepContext, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, Hq, D], k, v [B, T, Hkv, D]: write the slot's cache, attend causally -> [B, T, Hq * D]."""
        kv, rows = self._pools.kv[layer], ctx.rows
        if ctx.phase is Phase.PREFILL:
            return attend_rows(q, k, v, kv, ctx.on_host)
        return decode_attention(q, k, v, kv, slot=rows.slot, start=ctx.start, num_tokens=rows.num_tokens)

    def _initial_state(self, ctx: StepContext, layer: int, row: int, a: Tensor | None) -> Tensor:
        """State [H, P, N] float32 before the chunk: the carry of the last chunk, which is given up, or the checkpoint
        with its records.
        """
        slot = int(ctx.rows.slot[row])
        carry = self._pools.carries.get(slot, {}).pop(layer, None)
        if carry is not None:
            return carry
        state, cursors = self._pools.ssm[layer], self._pools.cursors
        if isinstance(state, ConventionalLayerState):
            return state.states[slot, cursors.origin[slot]]
        index = torch.tensor([slot], device=ctx.start.device)
        if a is None:
            return gdn.gdn_fold(state, cursors, index)[0]
        return mamba2.mamba2_fold(state, cursors, index, a)[0]

    def _leave_state(self, ctx: StepContext, layer: int, row: int, final: Tensor) -> None:
        """Keep the state after the chunk: in the checkpoint, rounded, when the prompt ends; else carried in float32."""
        slot = int(ctx.rows.slot[row])
        if not bool(ctx.last_chunk[row]):
            self._pools.carries.setdefault(slot, {})[layer] = final
            return
        state, cursors = self._pools.ssm[layer], self._pools.cursors
        if isinstance(state, ReplayLayerState):
            index = torch.tensor([slot], device=ctx.start.device)
            absorbed = ctx.start[row : row + 1] + ctx.rows.num_tokens[row : row + 1]
            flush.store_checkpoints(state, cursors, index, final[None], absorbed)
        else:
            state.states[slot, 0] = final
