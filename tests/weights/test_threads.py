"""`in_order`: results at their places, few items under way, errors where they belong, nothing begun behind the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from trtllm_replayssm.weights.threads import MOST_THREADS, in_order, usable_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_however_long_each_takes(threads: int) -> None:
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3 == 0))
        return item * item

    assert list(in_order(work, range(40), threads)) == [item * item for item in range(40)]
    assert list(in_order(work, [], threads)) == []


def test_few_items_are_under_way_and_are_taken_by_the_caller() -> None:
    taken, caller = [], threading.get_ident()

    def items() -> Iterator[int]:
        for item in range(30):
            assert threading.get_ident() == caller
            taken.append(item)
            yield item

    for given, result in enumerate(in_order(lambda item: item, items(), 3)):
        assert result == given and len(taken) - given <= 6


def test_several_threads_work_at_once() -> None:
    together = threading.Barrier(2, timeout=20)  # passes when two items are in work at the same time
    assert list(in_order(lambda item: together.wait() >= 0, range(2), 2)) == [True, True]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_out_at_its_place_and_ends_the_work(threads: int) -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 4:
            raise ValueError("the fifth")
        return item

    results = in_order(work, range(1000), threads)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the fifth"):
        next(results)
    assert len(begun) < 20 and next(results, None) is None


def test_a_caller_that_stops_leaves_nothing_running() -> None:
    before = threading.active_count()
    results = in_order(lambda item: item, range(1000), 3)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_threads_are_bounded() -> None:
    assert 1 <= usable_threads() <= MOST_THREADS
