"""The board: words that never tear, and texts that say when they would."""

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.board import Board, Word, WorkerState
from shm.layout import PAGE_BYTES, Layout
from shm.segment import Segment
from tests.shm.conftest import Peer
from tests.shm.peer import PATTERNS, TEXTS


def test_every_word_has_a_place_of_its_own_in_the_snapshot(segment: Segment) -> None:
    board = Board(segment)
    for word in Word:
        board.set(word, 1000 + word)
    board.state = WorkerState.DRAINING
    snapshot = board.snapshot()
    assert snapshot.state is WorkerState.DRAINING
    for word in Word:
        if word is not Word.STATE:
            assert getattr(snapshot, word.name.lower()) == 1000 + word


def test_a_new_board_says_starting_and_nothing_else(segment: Segment) -> None:
    snapshot = Board(segment).snapshot()
    assert snapshot.state is WorkerState.STARTING
    assert {getattr(snapshot, word.name.lower()) for word in Word if word is not Word.STATE} == {0}
    assert (Board(segment).error.read(), Board(segment).info.read()) == ("", "")


@pytest.mark.parametrize("state", WorkerState)
def test_every_state_comes_through(segment: Segment, state: WorkerState) -> None:
    Board(segment).state = state
    assert Board(segment).state is Board(segment).snapshot().state is state


def test_an_impossible_state_is_still_a_state(segment: Segment) -> None:
    Board(segment).set(Word.STATE, 2**64 - 1)
    assert Board(segment).state in WorkerState
    assert Board(segment).snapshot().state in WorkerState


def test_adding_counts(segment: Segment) -> None:
    board = Board(segment)
    board.add(Word.TOKENS_OUT)
    board.add(Word.TOKENS_OUT, 41)
    assert board.get(Word.TOKENS_OUT) == 42


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=700), min_size=1))
def test_a_text_is_read_as_written_up_to_its_room(texts: list[str]) -> None:
    segment = Segment.create(Layout(slots=1, context=16, ring_records=64), epoch=1)
    board = Board(segment)
    board.info.write("untouched")
    for text in texts:
        board.error.write(text)
        assert board.error.read() == text.encode()[:512].decode("utf-8", "replace")
    assert board.info.read() == "untouched"
    segment.close()


def test_a_text_that_is_no_utf8_is_written_as_far_as_it_goes(segment: Segment) -> None:
    board = Board(segment)
    board.error.write("lost \udcff byte")
    assert board.error.read() == "lost ? byte"


def test_texts_stay_on_their_page(segment: Segment) -> None:
    board = Board(segment)
    board.error.write("e" * 10_000)
    board.info.write("i" * 10_000)
    assert (len(board.error.read()), len(board.info.read())) == (512, 1536)
    assert not any(segment.words[2 * PAGE_BYTES // 8 : 2 * PAGE_BYTES // 8 + 64])


def test_a_text_whose_writer_died_in_the_middle_is_not_shown(segment: Segment) -> None:
    board = Board(segment)
    board.error.write("whole")
    segment.words[board.error._sequence] |= 1
    assert board.error.read() == ""
    board.error.write("next")
    assert board.error.read() == "next"


def test_no_word_and_no_text_is_ever_seen_torn(segment: Segment, start_peer: Callable[[str], Peer]) -> None:
    board = Board(segment)
    peer = start_peer("toggle")
    assert peer.line() == "toggling"
    seen: set[int] = set()
    texts: set[str] = set()
    rounds = 0
    deadline = time.monotonic() + 20
    while rounds < 40_000 or seen < set(PATTERNS) or texts < set(TEXTS):
        seen |= {board.get(Word.STEPS), board.snapshot().steps}
        texts.add(board.error.read())
        rounds += 1
        assert time.monotonic() < deadline, f"the peer toggles too slowly: {len(seen)} words, {len(texts)} texts"
    assert seen == set(PATTERNS)
    assert texts == set(TEXTS)
    peer.end()
