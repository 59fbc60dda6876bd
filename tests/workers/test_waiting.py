"""The queue's bounds, its reservations and its order."""

import random

import pytest

from tests.workers.jobs import make_job
from workers.errors import Overloaded
from workers.waiting import WaitingQueue


def make(requests: int = 3, tokens: int = 1000) -> WaitingQueue:
    return WaitingQueue(request_limit=requests, token_limit=tokens)


def reserve(queue: WaitingQueue, tokens: int = 1, free_capacity: int = 0) -> None:
    queue.reserve(tokens, free_capacity=free_capacity, retry_after_s=lambda: 2.5)


def test_it_is_full_by_requests_waiting_and_reserved_together() -> None:
    queue = make(requests=3)
    queue.append(make_job())
    reserve(queue)
    reserve(queue)
    with pytest.raises(Overloaded) as full:
        reserve(queue)
    assert (full.value.bound, full.value.limit, full.value.retry_after_s) == ("requests", 3, 2.5)


def test_free_capacity_does_not_count_against_the_limit() -> None:
    queue = make(requests=1)
    for _ in range(5):
        reserve(queue, free_capacity=4)
    with pytest.raises(Overloaded):
        reserve(queue, free_capacity=4)


def test_a_limit_of_none_waiting_still_takes_what_can_run_at_once() -> None:
    queue = make(requests=0)
    reserve(queue, free_capacity=1)
    with pytest.raises(Overloaded):
        reserve(queue, free_capacity=1)


def test_it_is_full_by_prompt_tokens_waiting_and_reserved_together() -> None:
    queue = make(requests=100, tokens=100)
    queue.append(make_job(60))
    reserve(queue, tokens=40)
    with pytest.raises(Overloaded) as full:
        reserve(queue, tokens=1)
    assert (full.value.bound, full.value.limit) == ("prompt tokens", 100)


def test_one_prompt_longer_than_the_limit_is_taken_when_nothing_waits() -> None:
    reserve(make(tokens=100), tokens=500)


def test_a_reservation_is_given_back_once_however_often_it_is_released() -> None:
    queue = make(requests=1, tokens=10)
    reservation = queue.reserve(10, free_capacity=0, retry_after_s=lambda: 1.0)
    held = [reservation.is_held]
    for _ in range(3):
        reservation.release()
        held.append(reservation.is_held)
    assert held == [True, False, False, False]
    assert (queue.reserved, queue.reserved_tokens) == (0, 0)
    reserve(queue)


def test_a_reservation_takes_the_size_that_tokenising_found() -> None:
    queue = make(requests=10, tokens=100)
    reservation = queue.reserve(10, free_capacity=0, retry_after_s=lambda: 1.0)
    reservation.resize(90)
    with pytest.raises(Overloaded):
        reserve(queue, tokens=11)
    reservation.release()
    reservation.resize(5)
    assert queue.reserved_tokens == 0


def test_first_come_first_served() -> None:
    queue = make()
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        queue.append(job)
    assert list(queue) == jobs


def test_turns_that_come_back_go_before_new_ones_in_the_order_of_their_submission() -> None:
    queue = make(requests=100)
    returned = [make_job(submitted_s=float(when)) for when in range(20)]
    new = [make_job(submitted_s=float(when)) for when in range(100, 103)]
    for job in new:
        queue.append(job)
    for job in random.Random(3).sample(returned, 20):
        queue.put_back(job)
    assert list(queue) == returned + new


def test_removing_finds_new_and_returned_ones_once() -> None:
    queue = make()
    new, returned, stranger = make_job(7), make_job(9), make_job()
    queue.append(new)
    queue.put_back(returned)
    assert (len(queue), queue.tokens) == (2, 16)
    assert [queue.remove(job) for job in (stranger, new, new, returned, returned)] == [False, True, False, True, False]
    assert (len(queue), queue.tokens) == (0, 0)


def test_the_queue_may_change_while_it_is_gone_through() -> None:
    queue = make()
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        queue.append(job)
    assert [job for job in queue if queue.remove(job)] == jobs


def test_the_age_is_that_of_the_first_in_line() -> None:
    queue = make()
    assert queue.oldest_s(10.0) == 0.0
    queue.append(make_job(submitted_s=8.0))
    assert queue.oldest_s(10.0) == 2.0
    queue.put_back(make_job(submitted_s=3.0))
    assert queue.oldest_s(10.0) == 7.0


def test_a_prompt_that_turns_out_longer_than_the_queue_bears_is_refused_and_gives_its_place_back() -> None:
    queue = make(requests=9, tokens=100)
    reserve(queue, 60)
    reservation = queue.reserve(30, free_capacity=0, retry_after_s=lambda: 1.0)
    with pytest.raises(Overloaded) as full:
        reservation.resize(50)
    assert full.value.bound == "prompt tokens"
    assert (queue.reserved, queue.reserved_tokens, queue.rejected) == (1, 60, 1)


def test_a_request_alone_may_have_any_length() -> None:
    queue = make(tokens=100)
    queue.reserve(30, free_capacity=0, retry_after_s=lambda: 1.0).resize(5000)
    assert queue.reserved_tokens == 5000
