"""The token ring against a deque, and against a writer that is killed at any moment."""

import os
import random
import signal
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.ring_soak import soak
from shm.layout import WORD_BYTES, Layout
from shm.ring import Kind, RingReader, RingWriter, bits_float, float_bits, record_head
from shm.segment import Segment
from tests.shm.conftest import Peer
from tests.shm.peer import words_of

U32 = st.integers(0, 2**32 - 1)
RECORDS = st.tuples(st.integers(0, 2**16 - 1), U32, st.sampled_from(Kind), U32, U32)


class RingMachine(RuleBasedStateMachine):
    """Pushes, publishes and drains at random; two deques say what must be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment.create(Layout(slots=1, context=16, ring_records=64), epoch=1)
        self.pushed: deque[tuple[int, int]] = deque()
        self.published: deque[tuple[int, int]] = deque()

    @initialize(position=st.sampled_from([0, 63, 2**32 - 5, 2**63]))
    def open(self, position: int) -> None:
        layout = self.segment.layout
        for offset in (layout.written_offset, layout.read_offset):
            self.segment.words[offset // WORD_BYTES] = position
        self.writer = RingWriter(self.segment)
        self.reader = RingReader(self.segment)

    @rule(count=st.integers(0, 80), record=RECORDS)
    def push(self, count: int, record: tuple[int, int, Kind, int, int]) -> None:
        slot, generation, kind, value, detail = record
        head = record_head(slot, generation, kind)
        for index in range(count):
            has_room = len(self.pushed) + len(self.published) < 64
            words = head, (value + index) % 2**32, (detail - index) % 2**32
            assert self.writer.try_push(*words) == has_room
            if has_room:
                self.pushed.append((head, words[1] << 32 | words[2]))

    @rule()
    def publish(self) -> None:
        assert self.writer.publish() == bool(self.pushed)
        self.published += self.pushed
        self.pushed.clear()

    @rule()
    def drain(self) -> None:
        words = self.reader.drain()
        assert list(zip(words[::2], words[1::2], strict=True)) == list(self.published)
        self.published.clear()

    @rule()
    def replace_the_writer(self) -> None:
        """What a dead writer had not published is lost, and nothing else."""
        self.writer = RingWriter(self.segment)
        self.pushed.clear()

    @invariant()
    def fill_is_what_was_published(self) -> None:
        if hasattr(self, "reader"):
            assert self.reader.fill == self.writer.fill == len(self.published)

    def teardown(self) -> None:
        self.segment.close()


TestRingAgainstADeque = RingMachine.TestCase
TestRingAgainstADeque.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(RECORDS)
def test_a_record_gives_back_what_was_put_into_it(record: tuple[int, int, Kind, int, int]) -> None:
    slot, generation, kind, value, detail = record
    segment = Segment.create(Layout(slots=1, context=16, ring_records=64), epoch=1)
    writer = RingWriter(segment)
    writer.try_push(record_head(slot, generation, kind), value, detail)
    writer.publish()
    head, payload = RingReader(segment).drain()
    assert (head >> 32, head >> 16 & 0xFFFF, head & 0xFFFF) == (generation, slot, kind)
    assert (payload >> 32, payload & 0xFFFFFFFF) == (value, detail)
    segment.close()


@given(st.floats(width=32, allow_nan=False))
def test_a_logprob_is_stored_as_its_float32_bits(value: float) -> None:
    assert bits_float(float_bits(value)) == value
    assert 0 <= float_bits(value) < 2**32


def test_nothing_is_visible_before_it_is_published(segment: Segment) -> None:
    writer, reader = RingWriter(segment), RingReader(segment)
    writer.try_push(*words_of(0))
    assert (reader.fill, reader.drain()) == (0, [])
    assert writer.publish()
    assert not writer.publish()
    assert reader.fill == 1


def test_a_full_ring_refuses_and_takes_again_once_it_was_drained(segment: Segment) -> None:
    writer, reader = RingWriter(segment), RingReader(segment)
    assert [writer.try_push(*words_of(number)) for number in range(65)] == [True] * 64 + [False]
    assert reader.drain() == []
    assert not writer.try_push(*words_of(64))
    writer.publish()
    assert len(reader.drain()) == 128
    assert writer.try_push(*words_of(64))


@pytest.mark.parametrize(("written", "read"), [(65, 0), (0, 1), (2**64 - 1, 0)])
def test_impossible_positions_are_a_fault_and_nothing_is_taken(segment: Segment, written: int, read: int) -> None:
    layout = segment.layout
    segment.words[layout.written_offset // WORD_BYTES] = written
    segment.words[layout.read_offset // WORD_BYTES] = read
    reader = RingReader(segment)
    with pytest.raises(ValueError, match="positions"):
        reader.drain()
    assert segment.words[layout.read_offset // WORD_BYTES] == read


def test_a_writer_killed_at_any_moment_leaves_no_partial_record() -> None:
    """200 writers, one after another on the same ring; each record tells in both words which one it must be."""
    segment = Segment.create(Layout(slots=1, context=16, ring_records=4096), epoch=5)
    reader = RingReader(segment)
    peer = Peer(segment, "writers")
    chance = random.Random(4)
    taken = 0
    for _ in range(200):
        peer.poke()
        pid = int(peer.line())
        wanted = chance.randint(1, 2000)
        deadline = time.monotonic() + 10
        while reader.fill < wanted:
            os.sched_yield()
            assert time.monotonic() < deadline, f"writer {pid} made {reader.fill} records of {wanted}"
        os.kill(pid, signal.SIGKILL)
        assert peer.line() == "gone"
        words = reader.drain()
        for head, payload in zip(words[::2], words[1::2], strict=True):
            expected_head, value, detail = words_of(taken)
            assert (head, payload) == (expected_head, value << 32 | detail), f"record {taken}"
            taken += 1
    assert taken > 100_000
    peer.close()
    segment.close()


def test_a_million_records_pass_between_two_processes_in_order() -> None:
    result = soak(1_000_000, ring_records=1024)
    assert result.records == 1_000_000


def test_the_smallest_ring_loses_no_record_and_no_wakeup() -> None:
    result = soak(100_000, ring_records=64)
    assert result.wakeups > 100
