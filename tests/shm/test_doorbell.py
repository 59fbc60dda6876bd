"""Doorbells lose no ring, and the lifeline tells of an end."""

import os
import select
import socket
import subprocess
import sys

from shm.doorbell import Doorbell, lifeline
from shm.layout import Layout
from shm.ring import RingReader, RingWriter
from shm.segment import Segment
from tests.shm.peer import words_of


def is_readable(thing: Doorbell | socket.socket, timeout_s: float = 0.0) -> bool:
    return bool(select.select([thing], (), (), timeout_s)[0])


def test_rings_add_up_to_one_and_clearing_answers_all() -> None:
    bell = Doorbell.create()
    assert not bell.clear()
    for _ in range(5):
        bell.ring()
    assert is_readable(bell)
    assert bell.clear()
    assert not is_readable(bell)
    assert not bell.clear()
    bell.close()


def test_ringing_never_blocks_even_when_nobody_ever_answers() -> None:
    bell = Doorbell.create()
    os.eventfd_write(bell.fd, 2**64 - 2)
    bell.ring()
    assert is_readable(bell)
    assert bell.clear()
    bell.close()


def test_a_bell_is_private_to_those_it_is_passed_to_and_closes_once() -> None:
    bell = Doorbell.create()
    assert not os.get_inheritable(bell.fd)
    bell.close()
    bell.close()
    assert bell.fd == -1


def test_a_ring_between_clearing_and_looking_is_not_lost() -> None:
    """Clear first, then look: whatever comes in between leaves the bell rung."""
    segment = Segment.create(Layout(slots=1, context=16, ring_records=64), epoch=1)
    writer, reader, bell = RingWriter(segment), RingReader(segment), Doorbell.create()

    def write(number: int) -> None:
        writer.try_push(*words_of(number))
        writer.publish()
        bell.ring()

    write(0)
    assert bell.clear()
    write(1)  # after the bell was cleared, before the ring is drained
    assert len(reader.drain()) == 4
    assert is_readable(bell)  # a wake-up for nothing, but never none for something
    write(2)
    bell.clear()
    assert len(reader.drain()) == 2
    segment.close()
    bell.close()


def test_each_end_of_a_lifeline_sees_the_other_go() -> None:
    ours, theirs = lifeline()
    assert not is_readable(ours)
    theirs.close()
    assert is_readable(ours)
    assert ours.recv(1) == b""
    ours.close()


def test_a_lifeline_ends_when_its_holder_is_killed() -> None:
    ours, theirs = lifeline()
    holder = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", "import os; os.read(0, 1)"],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    assert not is_readable(ours)
    holder.kill()
    assert is_readable(ours, 5.0)
    assert ours.recv(1) == b""
    holder.communicate()
    ours.close()
