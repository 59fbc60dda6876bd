"""Regions of a segment: aligned, apart from each other, and inside the segment."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.layout import (
    ERROR_BYTES,
    HEADER_WORDS,
    LINE_BYTES,
    MAGIC,
    MAX_SLOTS,
    PAGE_BYTES,
    RECORD_BYTES,
    SLOT_WORDS,
    VERSION,
    WORD_BYTES,
    Layout,
)

LAYOUTS = st.builds(
    Layout,
    slots=st.integers(1, MAX_SLOTS),
    context=st.integers(1, 1_000_000),
    ring_records=st.sampled_from([64, 128, 4096, 65536]),
    options_bytes=st.integers(16, 4096).map(lambda lines: lines * LINE_BYTES),
)


@given(LAYOUTS)
def test_regions_are_in_order_and_do_not_overlap(layout: Layout) -> None:
    words = layout.slots * WORD_BYTES
    regions = [
        (0, HEADER_WORDS * WORD_BYTES),
        (layout.board_offset, PAGE_BYTES),
        (layout.written_offset, LINE_BYTES),
        (layout.read_offset, LINE_BYTES),
        (layout.generations_offset, words),
        (layout.cancels_offset, words),
        (layout.ring_offset, layout.ring_records * RECORD_BYTES),
        *((layout.slot_offset(slot), layout.slot_bytes) for slot in range(layout.slots)),
        (layout.size_bytes, 0),
    ]
    for (start, size), (following, _) in pairwise(regions):
        assert start + size <= following


@given(LAYOUTS)
def test_words_that_two_processes_share_never_straddle_a_cache_line(layout: Layout) -> None:
    shared = [layout.written_offset, layout.read_offset, layout.generations_offset, layout.cancels_offset]
    assert all(offset % LINE_BYTES == 0 for offset in shared)
    assert layout.ring_offset % PAGE_BYTES == layout.slots_offset % PAGE_BYTES == layout.slot_bytes % PAGE_BYTES == 0


@given(LAYOUTS)
def test_a_slot_holds_words_error_options_and_the_longest_prompt(layout: Layout) -> None:
    parts = SLOT_WORDS * WORD_BYTES + ERROR_BYTES + layout.options_bytes + layout.prompt_bytes
    assert parts <= layout.slot_bytes
    assert len(",".join(["1234567"] * min(layout.context, 1000))) <= layout.prompt_bytes


def test_the_header_says_everything_that_attaching_checks() -> None:
    layout = Layout(slots=3, context=100, ring_records=128, options_bytes=2048)
    assert layout.header(9) == (MAGIC, VERSION, 9, layout.size_bytes, 3, 100, 128, 2048)


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 0},
        {"slots": 257},
        {"context": 0},
        {"ring_records": 63},
        {"ring_records": 96},
        {"ring_records": 32},
        {"options_bytes": 1000},
        {"options_bytes": 960},
    ],
)
def test_sizes_that_no_segment_can_have_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        Layout(**{"slots": 1, "context": 64, **sizes})
