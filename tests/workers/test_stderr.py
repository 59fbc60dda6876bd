"""A decoder's log, bounded in every direction."""

from hypothesis import given
from hypothesis import strategies as st

from workers.stderr import LINE_LIMIT_BYTES, StderrTail


def test_lines_come_whole_whatever_the_borders_of_the_reads() -> None:
    tail = StderrTail()
    passed = [line for piece in (b"load", b"ing\nmodel", b"\r\n", b"\nready\nhal") for line in tail.feed(piece, 1.0)]
    assert [line.strip() for line in passed] == ["loading", "model", "", "ready"]
    tail.finish()
    assert list(tail.lines) == ["loading", "model", "", "ready", "hal"]
    assert tail.seen == 5


def test_a_line_of_a_megabyte_is_cut_and_costs_no_memory() -> None:
    tail = StderrTail()
    for _ in range(256):
        assert tail.feed(b"y" * 4096, 1.0) == []
        assert len(tail._partial) <= LINE_LIMIT_BYTES + 1
    assert tail.feed(b"end of it\nnext\n", 1.0) == ["next"]
    assert [len(line) for line in tail.lines] == [LINE_LIMIT_BYTES, 4]
    assert tail.seen == 2


def test_a_long_line_that_comes_in_one_read_is_cut_as_well() -> None:
    tail = StderrTail()
    passed = tail.feed(b"a" * 1_000_000 + b"\nb\n" + b"c" * 1_000_000 + b"\n", 1.0)
    assert [len(line) for line in passed] == [LINE_LIMIT_BYTES, 1, LINE_LIMIT_BYTES]


def test_bytes_that_are_no_text_are_replaced() -> None:
    tail = StderrTail()
    tail.feed(bytes(range(256)) * 4 + b"\nstill here\n", 1.0)
    assert tail.lines[-1] == "still here"
    assert all(line.isprintable() or "\ufffd" in line or line for line in tail.lines)


def test_only_the_last_lines_are_kept() -> None:
    tail = StderrTail(kept=3)
    tail.feed(b"".join(b"%d\n" % n for n in range(1000)), 1.0)
    assert list(tail.lines) == ["997", "998", "999"]
    assert tail.seen == 1000


def test_a_flood_is_passed_on_within_the_budget_and_the_rest_counted() -> None:
    tail = StderrTail(burst=10, rate_s=5.0)
    flood = b"noise\n" * 100
    assert len(tail.feed(flood, 100.0)) == 10
    assert len(tail.feed(flood, 100.0)) == 0
    assert len(tail.feed(flood, 101.0)) == 5
    assert len(tail.feed(flood, 200.0)) == 10, "a budget does not grow beyond its burst"
    assert tail.dropped == 375
    assert tail.seen == 400


@given(st.lists(st.binary(max_size=5000), max_size=20))
def test_any_bytes_are_taken_and_every_bound_holds(pieces: list[bytes]) -> None:
    tail = StderrTail(kept=5, burst=3, rate_s=0.0)
    passed = [line for piece in pieces for line in tail.feed(piece, 1.0)]
    tail.finish()
    assert len(passed) <= 3
    assert len(tail.lines) <= 5
    assert all(len(line) <= LINE_LIMIT_BYTES for line in [*passed, *tail.lines])
    assert tail.seen >= b"".join(pieces).count(b"\n")
    assert tail.dropped <= tail.seen
