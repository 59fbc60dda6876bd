"""The memfd: who may attach, and what ends with whom."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from shm.layout import Layout
from shm.segment import Segment, SegmentMismatch
from tests.shm.conftest import EPOCH, Peer

LAYOUT = Layout(slots=2, context=64, ring_records=64, options_bytes=1024)


def attached(segment: Segment, epoch: int = EPOCH) -> Segment:
    return Segment.attach(os.dup(segment.fd), epoch=epoch)


def test_both_ends_see_the_same_memory(segment: Segment) -> None:
    other = attached(segment)
    other.words[700] = 42
    other.bytes[-1] = 7
    assert (segment.words[700], segment.bytes[-1]) == (42, 7)
    assert other.layout == segment.layout
    other.close()


@pytest.mark.parametrize(
    ("word", "value", "field"),
    [
        (0, 0, "magic"),
        (0, 0x52494E4746454E44, "magic"),
        (1, 2, "version"),
        (2, EPOCH + 1, "epoch"),
        (3, LAYOUT.size_bytes + 4096, "size"),
        (4, 3, "size"),
        (4, 0, "layout"),
        (4, 2**63, "layout"),
        (5, 2**62, "size"),
        (6, 100, "layout"),
        (7, 1, "layout"),
    ],
)
def test_attaching_refuses_a_header_that_was_not_promised(
    segment: Segment, word: int, value: int, field: str, open_fds: Callable[[], int]
) -> None:
    segment.words[word] = value
    before = open_fds()
    with pytest.raises(SegmentMismatch) as caught:
        Segment.attach(segment.fd, epoch=EPOCH)
    assert caught.value.field == field
    assert open_fds() == before


def test_attaching_refuses_another_incarnation(segment: Segment) -> None:
    with pytest.raises(SegmentMismatch, match=f"epoch {EPOCH}, expected {EPOCH + 1}"):
        Segment.attach(segment.fd, epoch=EPOCH + 1)


@pytest.mark.parametrize("size_bytes", [0, 8, 63, 64, 4096])
def test_attaching_refuses_a_file_that_is_no_segment(size_bytes: int) -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        with pytest.raises(SegmentMismatch):
            Segment.attach(fd, epoch=EPOCH)
    finally:
        os.close(fd)


def test_a_mismatch_passes_through_context_managers_unchanged() -> None:
    @contextlib.contextmanager
    def anything() -> Iterator[None]:
        yield

    with pytest.raises(SegmentMismatch), anything():
        raise SegmentMismatch("magic", 1, 2)


def test_nobody_can_resize_a_segment(segment: Segment) -> None:
    for size_bytes in (0, segment.layout.size_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size_bytes)


def test_closing_gives_every_descriptor_back_and_may_be_repeated(open_fds: Callable[[], int]) -> None:
    before = open_fds()
    segment = Segment.create(LAYOUT, epoch=EPOCH)
    other = attached(segment)
    for _ in range(2):
        segment.close()
        other.close()
    assert open_fds() == before


def test_a_segment_has_no_name_that_could_be_left_behind(segment: Segment) -> None:
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith(f"/memfd:ringfence-{EPOCH}")
    assert not [name for name in os.listdir("/dev/shm") if "ringfence" in name]


@pytest.mark.parametrize("end", ["exit", "raise", "kill"])
def test_a_peer_that_ends_leaves_the_segment_to_its_successor(
    segment: Segment, start_peer: Callable[[str], Peer], end: str
) -> None:
    segment.words[700] = 42
    names = set(os.listdir("/dev/shm"))
    for _ in range(3):
        peer = start_peer("wait" if end == "kill" else end)
        assert peer.line() == "attached"
        if end == "kill":
            os.kill(peer.process.pid, signal.SIGKILL)
        errors = peer.end()
        assert "resource_tracker" not in errors
        assert peer.process.returncode == {"exit": 0, "raise": 1, "kill": -signal.SIGKILL}[end]
    assert segment.words[700] == 42
    successor = attached(segment)
    assert successor.words[700] == 42
    successor.close()
    assert not {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "ringfence"))} - names


def test_a_peer_refuses_the_segment_of_another_incarnation(segment: Segment, start_peer: Callable[[str], Peer]) -> None:
    segment.words[2] = EPOCH + 1
    peer = start_peer("exit")
    assert "SegmentMismatch" in peer.end()
    assert peer.process.returncode == 1


def test_a_segment_is_not_inherited_unless_it_is_passed(segment: Segment) -> None:
    assert not os.get_inheritable(segment.fd)
