"""Request slots: requests one way, results the other, each under its generation."""

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.layout import ERROR_BYTES, Layout
from shm.ring import Kind, RingReader
from shm.segment import Segment
from shm.slots import Finish, SlotHolder, SlotLessor, SlotResult
from tests.shm.conftest import Peer

COUNTS = st.integers(0, 2**40)
RESULTS = st.builds(
    SlotResult,
    finish=st.sampled_from(Finish),
    prompt_tokens=COUNTS,
    cached_tokens=COUNTS,
    generated=COUNTS,
    prompt_us=COUNTS,
    decode_us=COUNTS,
    drafts_accepted=COUNTS,
    drafts_offered=COUNTS,
    taken_ns=COUNTS,
    error=st.text(alphabet=st.characters(codec="ascii"), max_size=ERROR_BYTES),
)


def publish(lessor: SlotLessor, slot: int = 0, prompt: bytes = b"1,2,3", options: bytes = b"") -> int:
    return lessor.publish(slot, kind=0, prompt=[prompt], prompt_tokens=3, max_new=9, resume=0, options=options)


def make_segment() -> Segment:
    return Segment.create(Layout(slots=4, context=64, ring_records=64, options_bytes=1024), epoch=1)


@given(st.lists(st.binary(max_size=120), max_size=4), st.binary(max_size=1024), st.integers(0, 3), COUNTS)
def test_a_request_arrives_as_it_was_published(pieces: list[bytes], options: bytes, slot: int, count: int) -> None:
    segment = make_segment()
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    generation = lessor.publish(
        slot, kind=1, prompt=pieces, prompt_tokens=count, max_new=count + 1, resume=count + 2, options=options
    )
    assert holder.arrivals() == [(slot, generation)]
    request = holder.read(slot, generation)
    assert bytes(request.prompt) == b"".join(pieces)
    assert (request.kind, request.prompt_tokens, request.max_new) == (1, count, count + 1)
    assert (request.resume, request.options, request.slot, request.generation) == (count + 2, options, slot, generation)
    request.prompt.release()
    segment.close()


@given(RESULTS, st.integers(0, 3))
def test_a_result_is_read_as_it_was_written(result: SlotResult, slot: int) -> None:
    segment = make_segment()
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    generation = publish(lessor, slot)
    assert lessor.result(slot, generation) is None
    holder.write_result(slot, generation, result)
    assert lessor.result(slot, generation) == result
    assert all(lessor.result(other, generation) is None for other in range(4) if other != slot)
    segment.close()


def test_generations_grow_over_all_slots_and_are_used_once(segment: Segment) -> None:
    lessor = SlotLessor(segment)
    generations = [publish(lessor, slot) for slot in (0, 1, 0, 0, 1)]
    assert generations == [1, 2, 3, 4, 5]


def test_arrivals_come_once_and_in_the_order_of_publishing() -> None:
    segment = make_segment()
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    assert holder.arrivals() == []
    generations = {slot: publish(lessor, slot) for slot in (2, 0, 3)}
    assert holder.arrivals() == [(2, generations[2]), (0, generations[0]), (3, generations[3])]
    assert holder.arrivals() == []
    again = publish(lessor, 0)
    assert holder.arrivals() == [(0, again)]
    segment.close()


def test_a_late_result_of_the_last_lease_is_not_the_next_ones(segment: Segment) -> None:
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    first = publish(lessor)
    second = publish(lessor)
    holder.write_result(0, first, SlotResult(finish=Finish.CANCEL, generated=500))
    assert lessor.result(0, second) is None
    holder.write_result(0, second, SlotResult(finish=Finish.STOP, generated=2))
    assert lessor.result(0, first) is None
    found = lessor.result(0, second)
    assert found is not None
    assert (found.finish, found.generated) == (Finish.STOP, 2)


def test_a_late_cancel_names_a_generation_that_is_over(segment: Segment) -> None:
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    first = publish(lessor)
    lessor.cancel(0, first)
    assert holder.cancelled() == [first, 0]
    second = publish(lessor)
    assert second not in holder.cancelled()


def test_a_request_without_room_is_refused_before_anything_is_written(segment: Segment) -> None:
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    publish(lessor, 0, b"1,2,3", b"options")
    before = bytes(segment.bytes)
    layout = segment.layout
    for prompt, options in ((b"1" * (layout.prompt_bytes + 1), b""), (b"1", b"o" * (layout.options_bytes + 1))):
        with pytest.raises(ValueError, match="no room"):
            publish(lessor, 0, prompt, options)
    assert bytes(segment.bytes) == before
    assert len(holder.arrivals()) == 1


def test_the_fullest_request_leaves_its_neighbours_alone() -> None:
    segment = make_segment()
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    full = (b"9" * segment.layout.prompt_bytes, b"o" * segment.layout.options_bytes)
    generations = [publish(lessor, slot, *full) for slot in range(4)]
    for slot in (0, 2):
        holder.write_result(slot, generations[slot], SlotResult(finish=Finish.REFUSED, error="e" * 5000))
        assert holder.write_payload(slot, b"p" * segment.layout.prompt_bytes)
        assert not holder.write_payload(slot, b"p" * (segment.layout.prompt_bytes + 1))
    for slot in (1, 3):
        request = holder.read(slot, generations[slot])
        assert (bytes(request.prompt), request.options) == full
        assert lessor.result(slot, generations[slot]) is None
        request.prompt.release()
    assert lessor.payload(0, 9) == b"p" * 9
    assert lessor.payload(0, 10**9) == b"p" * segment.layout.prompt_bytes
    segment.close()


def test_an_error_text_is_cut_to_its_room_and_stays_text(segment: Segment) -> None:
    lessor, holder = SlotLessor(segment), SlotHolder(segment)
    generation = publish(lessor)
    holder.write_result(0, generation, SlotResult(finish=Finish.REFUSED, error="x" + "\u20ac" * 400))
    found = lessor.result(0, generation)
    assert found is not None
    assert found.error.startswith("x\u20ac\u20ac")
    assert len(found.error.encode("utf-8", "replace")) <= ERROR_BYTES + 2


def test_two_processes_exchange_requests_and_results(segment: Segment, start_peer: Callable[[str], Peer]) -> None:
    """The END record comes after the result: whoever sees the one finds the other, under the right generation."""
    lessor, reader = SlotLessor(segment), RingReader(segment)
    peer = start_peer("answer")
    assert peer.line() == "waiting"
    for number in range(200):
        slot = number % 2
        prompt = f"{number},{number * 7}"
        generation = publish(lessor, slot, prompt.encode())
        deadline = time.monotonic() + 10
        while not (words := reader.drain()):
            os.sched_yield()
            assert time.monotonic() < deadline
        assert words[0] == generation << 32 | slot << 16 | Kind.END
        found = lessor.result(slot, generation)
        assert found is not None
        assert found.error == prompt[::-1]
    peer.end()
