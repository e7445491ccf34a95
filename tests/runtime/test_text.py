"""Incremental decoding and stop strings: the pieces of a stream are the whole, however it is cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.runtime.harness import PieceTokenizer
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.runtime.text.detokenizer import MAX_WINDOW_TOKENS, REPLACEMENT, Detokenizer
from trtllm_replayssm.runtime.text.stops import StopMatcher
from trtllm_replayssm.runtime.text.tokenizer import FastTokenizer, load_tokenizer

BYTES = PieceTokenizer([bytes([i]) for i in range(256)])


def byte_level() -> Tokenizer:
    """A real byte-level tokenizer without merges, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_pieces() -> dict[int, str]:
    """What byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_fallback() -> Tokenizer:
    """A tokenizer whose decoder gives one U+FFFD for each byte of a run of byte tokens that is no text (yet)."""
    vocab = {**{f"<0x{i:02X}>": i for i in range(256)}, "a": 256, REPLACEMENT: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    """A tokenizer whose decoder treats the first token of a text differently."""
    words = {"▁the": 0, "▁sea": 1, "s": 2, "<end>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", ["héllo wörld", "日本語のテキスト", "a😀b👩‍👩‍👧c", "", "\ufffd real \ufffd"])
@pytest.mark.parametrize("tokenizer", [BYTES, FastTokenizer(byte_level())], ids=["toy", "tokenizers"])
def test_no_half_character_is_ever_shown(text: str, tokenizer: FastTokenizer) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == text
    for upto in range(len(pieces)):
        shown = "".join(pieces[:upto])
        assert text.startswith(shown)  # a half character would show as U+FFFD and not be a prefix


@given(st.lists(st.integers(0, 255), max_size=200))
def test_pieces_joined_are_the_text_of_the_whole_for_any_bytes(ids: list[int]) -> None:
    pieces = pieces_of(Detokenizer(BYTES), ids)
    assert "".join(pieces) == BYTES.decode(ids)


@settings(deadline=None)  # machines may be slow
@given(st.lists(st.integers(0, 256), max_size=200))
def test_pieces_joined_are_the_text_of_the_whole_where_tokens_have_a_text_of_their_own(ids: list[int]) -> None:
    tokenizer = FastTokenizer(byte_level())
    assert tokenizer.joins
    for skip in (True, False):
        pieces = pieces_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip)


@settings(deadline=None)  # machines may be slow
@given(st.lists(st.sampled_from(b"\xe2\x82\xac\xf0\x9f\x98\xff\x80\x00"), max_size=300), st.integers(50, 150))
@example([0xE2, 0x82, 0xAC], MAX_WINDOW_TOKENS - 2)
@example([0xE2, 0x82, 0xAC], MAX_WINDOW_TOKENS - 1)
@example([0xE2, *[0] * MAX_WINDOW_TOKENS, 0x82, 0xAC], 50)
def test_windows_that_are_cut_change_no_text(data: list[int], rubbish: int) -> None:
    """rubbish: bytes before the others, none of which is a character; a zero stands for the token that is left out."""
    tokenizer = FastTokenizer(byte_level())
    of = {byte: tokenizer.backend.token_to_id(piece) for byte, piece in byte_pieces().items()}
    of[0] = tokenizer.backend.token_to_id("<end>")
    ids = [of[byte] for byte in [*b"\xff" * rubbish, *data]]
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("count", [10, MAX_WINDOW_TOKENS - 2, MAX_WINDOW_TOKENS, 300])
def test_text_whose_tokens_all_end_inside_a_character_stays_whole(count: int) -> None:
    """Tokens of the last two bytes of one character and the first of the next: no window ever ends cleanly."""
    pieces = byte_pieces()
    first, *rest = (pieces[byte] for byte in "\u4e2d".encode())
    vocab = {first: 0, "".join([*rest, first]): 1, "".join(rest): 2}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token=first))
    backend.decoder = decoders.ByteLevel()
    tokenizer, ids = FastTokenizer(backend), [0, *[1] * count, 2]
    shown = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(shown) == "\u4e2d" * (count + 1) == tokenizer.decode(ids)
    assert all(len(piece) <= 2 for piece in shown), "as it comes"


def test_a_token_with_a_text_of_its_own_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[int]] = []
    tokenizer = FastTokenizer(byte_level())
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip: decoded.append(list(ids)) or decode(ids, skip))
    ids = tokenizer.encode("abcabc" * 100)
    for _ in range(3):
        assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "abcabc" * 100
    assert sorted(decoded) == sorted([i] for i in set(ids))


@pytest.mark.parametrize("decoder", [byte_fallback(), metaspace()], ids=["fallback", "metaspace"])
def test_other_decoders_are_shown_what_is_around_a_token(decoder: Tokenizer) -> None:
    assert not FastTokenizer(decoder).joins


@given(st.lists(st.integers(0, 3), max_size=30))
def test_pieces_joined_are_the_text_of_the_whole_for_a_decoder_that_strips_the_first_space(ids: list[int]) -> None:
    tokenizer = FastTokenizer(metaspace())
    for skip in (True, False):
        pieces = pieces_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip)


def test_bytes_that_are_no_text_keep_the_window_small() -> None:
    longest = []

    class Counting(PieceTokenizer):
        def decode(self, ids, skip_special_tokens=True):  # type: ignore[no-untyped-def]
            longest.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Counting(BYTES.pieces))
    shown = "".join(pieces_of(detokenizer, [0xFF] * 500))
    assert shown == REPLACEMENT * 500
    assert max(longest) <= 2 * MAX_WINDOW_TOKENS


@pytest.mark.parametrize("text", ["😀a", "é", "日本a", "日本語😀é", "a😀b👩‍👩‍👧c"])
def test_characters_of_single_byte_tokens_are_whole_where_a_decoder_marks_every_byte(text: str) -> None:
    tokenizer = FastTokenizer(byte_fallback())
    ids = list(text.encode())
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert [p for p in pieces if p] == list(text)  # each with its last byte, none before and none in part


@pytest.mark.parametrize("ids", [[256, 0xF0, 0x9F], [0xF0, 0x9F, 0x98], [0xF0, 256], [0xFF] * 9 + [256], [257] * 9])
def test_bytes_that_stay_unfinished_are_shown_as_a_decoder_that_marks_every_byte_does(ids: list[int]) -> None:
    tokenizer = FastTokenizer(byte_fallback())
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push(token)
        assert len(shown) >= count - 3  # what no character can lack any more is not held back
    assert shown + detokenizer.finish() == tokenizer.decode(ids)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokenizer = FastTokenizer(byte_level())
    ids = [*tokenizer.encode("ab"), tokenizer.backend.token_to_id("<end>"), *tokenizer.encode("c")]
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "abc"
    assert "".join(pieces_of(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "ab<end>c"


def reference_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop that is complete first, the longest of those, by looking at every prefix of the text."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=12),
    st.booleans(),
)
def test_i16_stops_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int], keep: bool) -> None:
    edges = [0, *itertools.accumulate(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    expected = reference_stop(text, stops)
    matcher = StopMatcher(stops, include_stop=keep)
    shown, found = "", None
    for piece in pieces:
        step = matcher.push(piece)
        shown += step.text
        if step.stop is not None:
            found = step.stop
            break
        read = text[: len(shown + matcher._held)]
        open_ends = [n for stop in stops for n in range(1, len(stop)) if read.endswith(stop[:n])]
        assert len(read) - len(shown) == max(open_ends, default=0)
    if expected is None:
        assert found is None and shown + matcher.finish() == text
    else:
        end, stop = expected
        assert found == stop
        assert shown == text[: end if keep else end - len(stop)]


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_of_stops_that_end_together_the_longest_wins(stops: list[str]) -> None:
    found = StopMatcher(stops, include_stop=False).push("xab")
    assert (found.text, found.stop) == ("x", "ab")


def test_a_stop_that_passed_before_the_minimum_is_not_found_later_in_the_text_held_back() -> None:
    matcher = StopMatcher(["ab", "abab"], include_stop=False)
    pieces = [matcher.push("ab", armed=False), matcher.push("x"), matcher.push("ab")]
    assert [(p.text, p.stop) for p in pieces] == [("", None), ("abx", None), ("", "ab")]


def test_text_that_may_become_a_stop_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["END.", "DOG"], include_stop=False)
    assert [matcher.push(p).text for p in ("the E", "N", "D", "O", "x")] == ["the ", "", "", "EN", "DOx"]


def test_a_tokenizer_is_read_from_a_folder_a_file_or_an_object(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json", byte_level(), BYTES):
        tokenizer = load_tokenizer(source)
        assert tokenizer.decode(tokenizer.encode("héé")) == "héé"


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="expected a path"):
        load_tokenizer(7)
