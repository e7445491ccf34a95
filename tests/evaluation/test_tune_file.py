"""The tune file when several runs add to it at once, and files that are written whole or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.tuning import add_entry, read_tune_file
from trtllm_replayssm.whole_file import whole_file

WRITERS, ENTRIES = 4, 8


def test_runs_that_add_to_one_file_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each run reads what is there, adds to it and writes the whole file: two that overlap would undo one another."""
    file, together = tmp_path / "made by the first" / "tuned.json", threading.Barrier(WRITERS)

    def run(number: int) -> None:
        together.wait(60)
        for batch in range(1, 1 + ENTRIES):
            add_entry(file, f"key {batch % 2}", {"batch": batch + ENTRIES * number, "window": 8, "launch": None})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(run, range(WRITERS)))
    batches = {key: [e["batch"] for e in entries] for key, entries in read_tune_file(file).items()}
    every = range(1, 1 + ENTRIES * WRITERS)
    assert batches == {f"key {odd}": [b for b in every if b % 2 == odd] for odd in (0, 1)}
    assert {p.name for p in file.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as out:
        out.write(b"first")
    with pytest.raises(OSError, match="disk"), whole_file(path) as out:
        out.write(b"half of the sec")
        raise OSError("disk full")
    assert path.read_bytes() == b"first" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_to_a_file_stays_one_whoever_writes(tmp_path: Path) -> None:
    """What it points to is written, so that runs over either name add to one file, under one lock."""
    file, link = tmp_path / "disk" / "tuned.json", tmp_path / "tuned.json"
    file.parent.mkdir()
    link.symlink_to(Path("disk") / "tuned.json")
    for batch, path in enumerate((link, file, link), 1):
        add_entry(path, "key", {"batch": batch, "window": 8, "launch": None})
    assert link.is_symlink() and [e["batch"] for e in read_tune_file(file)["key"]] == [1, 2, 3]
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "tuned.json"}
    assert {p.name for p in file.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """A device, a pipe or a folder: nothing but a file can appear whole."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="expected a file"), whole_file(path) as out:
            out.write(b"x")
    assert pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_two_writers_of_a_file_at_once_write_two_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as first, whole_file(path) as second:
        for piece in (b"1", b"2", b"3"):
            first.write(piece)
            second.write(b"other " + piece)
    assert path.read_bytes() == b"123" and [p.name for p in tmp_path.iterdir()] == ["file"]
