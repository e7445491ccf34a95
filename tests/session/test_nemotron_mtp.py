"""The MTP head of Nemotron-H (attention, then latent MoE): torch session and numpy interpreter against its equations.

No small public checkpoint has this head, so that one of random values is made here. The equations are written out
below from the checkpoint's own tensors and share no code with the package:

    m = eh_proj [enorm(embedding of token t + 1) | hnorm(hidden of t)]
    m = m + attention(norm_0(m));  m = m + moe(norm_1(m));  g = final_layernorm(m);  logits = lm_head(g)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.greedy import GreedyRun, generate
from tests.session.sessions import CPU, states
from tests.tolerance import LOGIT_NOISE
from tests.weights.small_models import NEMOTRON, Tensors, random_tensors, write
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.models import nemotron_h
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.graph import NumpyGraph, SequenceState, StepKind
from trtllm_replayssm.weights.checkpoint import Checkpoint

Array = np.ndarray
CONFIG = {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
FEW = 8  # a vocabulary in which a random head guesses right now and then
HEAD_KV = 4  # absolute layer of the head's attention, behind the four layers of the model
IDS = [5, 17, 3, 40, 22, 9, 31, 8, 44, 12, 27, 36, 6, 19, 47, 2, 33, 14, 25, 41, 11, 38, 29, 7, 20]
PROMPT, STEPS = (7, 6), ((4, 2), (1, 1), (3, 3), (4, 1), (2, 2))  # chunks; (tokens, accepted)
DRAFTS = 3


def tensors(config: dict[str, Any], seed: int = 5) -> Tensors:
    """Matrices that keep the size of what they multiply, norm weights around one and all different."""
    made = random_tensors(config, seed)
    for name, values in made.items():
        if name.endswith("norm.weight") or "norm_f" in name:
            made[name] = (1 + 0.4 * values.astype(np.float32)).astype(values.dtype)
        elif values.ndim == 2 and name != "backbone.embeddings.weight":
            made[name] = (values.astype(np.float32) / np.sqrt(values.shape[1])).astype(values.dtype)
    return made


def directory(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    return write(path, config, tensors(config))


def open_session(path: Path) -> TorchSession:
    checkpoint = Checkpoint.open(path)
    assert checkpoint.notes() == []
    weights = TorchWeights(checkpoint, torch.float32, CPU)
    pool = PoolConfig(slots=2, max_seq_len=64, activation=ActivationDtype.FLOAT32)
    replay = ReplayConfig(window=8, max_step_tokens=4)
    pools = StatePools.allocate(checkpoint.geometry, replay, pool, conventional=False, device=CPU)
    return TorchSession(weights, pools, debug=True)


class Equations:
    """The head of one sequence in float64. change: a wrong variant, which a test must tell from the right one."""

    def __init__(self, made: Tensors, change: str = "") -> None:
        self._w = {name: values.astype(np.float64) for name, values in made.items()}
        self._change = change
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def run(self, next_ids: Sequence[int], hidden: Array, at: int) -> tuple[Array, Array]:
        """Pairs (next_ids[i], hidden[i]) from position `at` on -> logits [n, V] and hidden states [n, H]."""
        del self.keys[at:], self.values[at:]
        rows = [self._token(token, previous) for token, previous in zip(next_ids, hidden, strict=True)]
        final = np.array(rows)
        return final @ self._w["lm_head.weight"].T, final

    def _token(self, token: int, previous: Array) -> Array:
        names = ["enorm", "hnorm"] if self._change != "norms" else ["hnorm", "enorm"]
        e = self._norm(self._w["backbone.embeddings.weight"][token], f"mtp.layers.0.{names[0]}")
        g = self._norm(previous, f"mtp.layers.0.{names[1]}")
        pair = [e, g] if self._change != "order" else [g, e]
        m = self._w["mtp.layers.0.eh_proj.weight"] @ np.concatenate(pair)
        layers = [self._attention, self._experts]
        for index, layer in enumerate(layers if self._change != "layers" else layers[::-1]):
            at = index if self._change != "layers" else 1 - index
            m = m + layer(self._norm(m, f"mtp.layers.{at}.norm"), f"mtp.layers.{at}.mixer.")
        return m if self._change == "final" else self._norm(m, "mtp.layers.1.final_layernorm")

    def _norm(self, x: Array, name: str) -> Array:
        return np.asarray(self._w[f"{name}.weight"] * x / np.sqrt(np.mean(x**2) + CONFIG["layer_norm_epsilon"]))

    def _attention(self, u: Array, mixer: str) -> Array:
        heads, kv_heads, size = 4, 2, 16
        q, k, v = (self._w[f"{mixer}{p}_proj.weight"] @ u for p in "qkv")
        self.keys.append(k.reshape(kv_heads, size))
        self.values.append(v.reshape(kv_heads, size))
        out = []
        for head, query in enumerate(q.reshape(heads, size)):
            group = head // (heads // kv_heads)
            scores = np.array([query @ key[group] for key in self.keys]) / np.sqrt(size)
            p = np.exp(scores - scores.max())
            out.append(sum(w * value[group] for w, value in zip(p / p.sum(), self.values, strict=True)))
        return np.asarray(self._w[f"{mixer}o_proj.weight"] @ np.concatenate(out))

    def _experts(self, u: Array, mixer: str) -> Array:
        def mlp(x: Array, name: str) -> Array:
            inner = np.maximum(self._w[f"{mixer}{name}.up_proj.weight"] @ x, 0) ** 2
            return np.asarray(self._w[f"{mixer}{name}.down_proj.weight"] @ inner)

        s = 1 / (1 + np.exp(-self._w[f"{mixer}gate.weight"] @ u))
        chosen = np.argsort(-(s + self._w[f"{mixer}gate.e_score_correction_bias"]))[:2]
        latent = self._w[f"{mixer}fc1_latent_proj.weight"] @ u
        routed = sum(s[e] * mlp(latent, f"experts.{e}") for e in chosen) / s[chosen].sum() * 2.5
        return np.asarray(self._w[f"{mixer}fc2_latent_proj.weight"] @ routed + mlp(u, "shared_experts"))


class Interpreter:
    """The numpy interpreter: the model, and its head with a position of its own."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        self.geometry = checkpoint.geometry
        self.state = SequenceState(replay=ReplayConfig(window=8, max_step_tokens=4), cursors=Cursors(seed=1))
        self.head = SequenceState()
        self._graphs = NumpyGraph(checkpoint, self.state), NumpyGraph(checkpoint, self.head)

    def forward(self, ids: Sequence[int], kind: StepKind, accepted: int) -> Array:
        """Final hidden states of the accepted tokens."""
        self.state.kind = kind
        hidden = nemotron_h.forward(self._graphs[0], self.geometry, np.array(ids)).hidden
        self.state.commit(len(ids), accepted)
        return hidden[:accepted]

    def run(self, next_ids: Sequence[int], hidden: Array, at: int) -> tuple[Array, Array]:
        """As `Equations.run`."""
        self.head.cursors.position = at
        output = nemotron_h.mtp_forward(self._graphs[1], self.geometry, np.array(next_ids), hidden)
        return output.logits, output.hidden


def test_the_interpreter_gives_the_equations(tmp_path: Path) -> None:
    path = directory(tmp_path)
    ours, theirs = Interpreter(path), Equations(tensors(CONFIG))
    hidden: Array = 3 * np.random.default_rng(1).standard_normal((6, 32))
    for ids, at in (([5, 9, 1, 30, 7, 7], 0), ([11], 6), ([12], 7), ([3, 44], 4)):  # the last one rolls back
        got, expected = ours.run(ids, hidden[: len(ids)], at), theirs.run(ids, hidden[: len(ids)], at)
        for mine, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9)
        hidden = got[1][-1:] if len(ids) == 1 or at == 0 else hidden
        hidden = np.concatenate([hidden, hidden[-1:] * 0.5])
    keys, values = ours.head.kv[HEAD_KV]
    np.testing.assert_allclose(keys, np.array(theirs.keys), rtol=0, atol=1e-9)
    np.testing.assert_allclose(values, np.array(theirs.values), rtol=0, atol=1e-9)


@pytest.mark.parametrize("change", ["order", "norms", "layers", "final"])
def test_the_random_checkpoint_tells_wrong_equations_from_right_ones(change: str) -> None:
    made, hidden = tensors(CONFIG), np.random.default_rng(2).standard_normal((5, 32))
    right, wrong = Equations(made), Equations(made, change)
    difference = np.abs(right.run(IDS[:5], hidden, 0)[0] - wrong.run(IDS[:5], hidden, 0)[0]).max(-1)
    assert difference.min() > 100 * LOGIT_NOISE, difference


def test_the_sessions_drafts_are_those_of_interpreter_and_equations(tmp_path: Path) -> None:
    """After prompt chunks and after steps with rejected tokens; each time DRAFTS deep, then rolled back."""
    session, interpreter, equations = (
        open_session(directory(tmp_path)),
        Interpreter(tmp_path),
        Equations(tensors(CONFIG)),
    )
    models: tuple[Interpreter | Equations, ...] = (interpreter, equations)
    slot, at = session.allocate(1), 0
    moves = [(size, size, index == len(PROMPT) - 1) for index, size in enumerate(PROMPT)]
    for width, accepted, last in (*moves, *((w, a, None) for w, a in STEPS)):
        ids = [*IDS[at : at + accepted], *((t + 17) % 48 for t in IDS[at + accepted : at + width])]
        if last is not None:
            session.prefill([PrefillChunk(slot, ids, last)])
            kind = StepKind.PROMPT_END if last else StepKind.PROMPT
        else:
            session.decode([DecodeRow(slot, ids)])
            session.commit([accepted])
            kind = StepKind.DECODE
        hidden = interpreter.forward(ids, kind, accepted)
        next_ids = IDS[at + 1 : at + accepted + 1]
        place, both = at, [hidden, hidden]
        got = session.mtp_begin([MtpRow(slot, next_ids)])[0]
        for draft in range(DRAFTS):
            for i, model in enumerate(models):
                logits, final = model.run(next_ids, both[i], place)
                assert np.abs(got - logits[-1]).max() <= LOGIT_NOISE, (at, draft, i)
                both[i] = final[-1:]
            place += len(next_ids)
            next_ids = [int(got.argmax())]
            if draft < DRAFTS - 1:
                got = session.mtp_next(next_ids)[0]
        at += accepted
    assert at == sum(PROMPT) + sum(accepted for _, accepted in STEPS) == session.cursors(slot).position
    for cache, expected in zip(session.pools.kv[HEAD_KV].tensors(), (equations.keys, equations.values), strict=True):
        want = np.array(expected[:at]).swapaxes(0, 1)
        assert np.abs(cache[slot, :, :at].numpy() - want).max() <= LOGIT_NOISE


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_drafting_with_the_head_gives_the_tokens_and_states_of_plain_greedy(
    tmp_path: Path, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(tmp_path, {**CONFIG, "vocab_size": FEW})
    runs: list[GreedyRun] = []
    final: list[tuple[int, list[torch.Tensor]]] = []
    for count in (0, drafts):
        session = open_session(path)

        def keep(slot: int, session: TorchSession = session) -> None:
            final.append((session.cursors(slot).position, states(session, slot)))

        monkeypatch.setattr(session, "free", keep)  # the last thing that a run does with its slot
        runs.append(generate(session, [5, 3, 7, 1, 6, 2], 48, mtp_drafts=count))
    plain, drafted = runs
    assert min(plain.margins) > 2 * LOGIT_NOISE
    assert drafted.ids == plain.ids
    assert 1 in drafted.accepted and max(drafted.accepted) > 1, drafted.accepted
    assert final[0][0] == final[1][0] == 6 + 48 - 1
    for got, want in zip(final[1][1], final[0][1], strict=True):
        assert float((got - want).abs().max()) <= LOGIT_NOISE * float(want.abs().max())
