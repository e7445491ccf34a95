"""A pytest plugin: processes with the same list of tests share it, each takes the next that none has taken.

REPLAYSSM_CLAIMS names a folder that holds a file for each test that is taken.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def claim_of(folder: Path, test: str) -> Path:
    """The file that says that the test is taken."""
    return folder / hashlib.sha256(test.encode()).hexdigest()[:24]


def claim(folder: Path, test: str) -> bool:
    """Take the test; False: another process has it."""
    try:
        os.close(os.open(claim_of(folder, test), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run what nobody else has taken. The next test is taken early: fixtures live on for it."""
    folder = Path(os.environ["REPLAYSSM_CLAIMS"])

    def taken() -> Iterator[pytest.Item]:
        for item in session.items:
            if claim(folder, item.nodeid):
                yield item

    items = taken()
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True
