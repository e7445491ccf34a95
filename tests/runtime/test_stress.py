"""Random traffic: whatever arrives, leaves, is moved out or cancelled, every request gets its solo answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, bench, noisy

MODEL = hash_model(VOCAB, sharpness=2.0)
HEAD = noisy(MODEL, hash_model(VOCAB, salt=9), every=3)
# Drawn once with sampled drafts, a token depends on where drafts began: only one-hot drafts can promise the solo text.
KINDS = tuple(kind for kind in DRAFTERS if kind != "mtp-sampled")


@dataclass(frozen=True)
class Ask:
    """One request of the random traffic."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    greedy: bool
    n: int
    penalty: float

    def settings(self) -> dict[str, object]:
        sampled = {} if self.greedy else {"temperature": 0.8, "top_k": 6}
        common = {"max_tokens": self.max_tokens, "seed": self.seed, "n": self.n, "presence_penalty": self.penalty}
        return {**common, **sampled}


@cache
def solo(ask: Ask) -> list[tuple[list[int], str | None]]:
    machine = bench(model=MODEL, slots=3, max_seq_len=40)
    number = machine.add(ask.prompt, **ask.settings())
    return [(o.token_ids, o.finish_reason) for o in machine.run()[number].outputs]


asks = st.builds(
    Ask,
    prompt=st.lists(st.integers(1, 4), min_size=1, max_size=30).map(tuple),
    max_tokens=st.integers(1, 20),
    seed=st.integers(0, 3),
    greedy=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    penalty=st.sampled_from([0.0, 0.2]),  # with one the host draws, also beside a device loop
)
events = st.lists(
    st.one_of(
        asks, st.just("step"), st.just("step"), st.tuples(st.sampled_from(["cancel", "preempt"]), st.integers(0, 9))
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events, st.sampled_from(KINDS), st.integers(1, 7), st.sampled_from([3, 4, 8]), st.integers(1, 3), st.booleans()
)
# Its one token after the prompt's leaves no room for drafts: the head has never seen the prompt.
@example([Ask((1,), 2, 0, False, 1, 0.0)], "mtp", 1, 3, 1, True)
def test_every_request_of_random_traffic_gets_its_solo_answer(
    traffic: list[object], kind: str, chunk: int, window: int, draft_len: int, ahead: bool
) -> None:
    """ahead: with a device loop."""
    machine = bench(
        kind, model=MODEL, head_model=HEAD, slots=3, max_seq_len=40, chunk=chunk, window=max(window, draft_len + 1),
        draft_len=draft_len, ahead=ahead,
    )  # fmt: skip
    asked: dict[int, Ask] = {}
    cancelled: dict[int, list[tuple[list[int], str | None]]] = {}
    for event in traffic:
        if isinstance(event, Ask):
            asked[machine.add(event.prompt, **event.settings())] = event
        elif event == "step":
            machine.step()
        elif asked:
            what, which = event  # type: ignore[misc]
            number = list(asked)[which % len(asked)]
            if what == "preempt":
                machine.engine.preempt(number)
            else:
                output = machine.engine.cancel(number)
                if output is not None:
                    cancelled[number] = [(o.token_ids, o.finish_reason) for o in output.outputs]
            machine.engine.check_integrity()
    machine.run()
    assert machine.session.free_slots == 3
    # a cancelled request's last step on the device is nobody's
    assert machine.session.flushes == machine.engine.stats.flushes or (ahead and cancelled)
    assert asked.keys() == machine.done.keys() | cancelled.keys()
    for number, ask in asked.items():
        if number in cancelled:
            for (tokens, reason), (whole, _) in zip(cancelled[number], solo(ask), strict=True):
                assert tokens == whole[: len(tokens)] and (reason == "cancelled" or tokens == whole)
        else:
            assert [(o.token_ids, o.finish_reason) for o in machine.done[number].outputs] == solo(ask)
