"""Whose fault a decoder's death is."""

from collections.abc import Sequence

import pytest

from workers.blame import CLEARED_TOKENS, IDLE_LOSSES, Record, accuse, may_join

LIMIT = 2


def crash(*present: Record, tokens: Sequence[int] | None = None, limit: int = LIMIT) -> list[bool]:
    counts = tokens or [0] * len(present)
    return accuse(list(zip(present, counts, strict=True)), is_external=False, limit=limit)


def killed(*present: tuple[Record, int]) -> list[bool]:
    return accuse(list(present), is_external=True, limit=LIMIT)


def test_the_first_death_refuses_nobody_and_suspects_everybody() -> None:
    records = [Record() for _ in range(4)]
    assert crash(*records) == [False] * 4
    assert all(record.is_suspect(0) for record in records)


def test_a_turn_alone_at_two_deaths_is_refused() -> None:
    record = Record()
    assert crash(record) == [False]
    assert crash(record) == [True]
    assert record.deaths == 2


def test_the_guilty_is_found_at_its_second_death_among_fresh_co_runners() -> None:
    guilty = Record()
    first_victims, second_victims = [Record(), Record()], [Record(), Record()]
    crash(guilty, *first_victims)
    assert crash(second_victims[0], guilty, second_victims[1]) == [False, True, False]
    assert not any(record.is_suspect(0) for record in second_victims), "the guilty is known: nobody else is suspected"


def test_innocents_of_the_first_death_are_spared_when_the_guilty_dies_again_elsewhere() -> None:
    guilty, innocent = Record(), Record()
    crash(guilty, innocent)
    assert crash(guilty) == [True]
    assert innocent.deaths == 1
    assert accuse([], is_external=False, limit=LIMIT) == []


def test_a_suspect_is_cleared_by_enough_tokens() -> None:
    record = Record()
    crash(record, tokens=[10])
    assert record.is_suspect(10 + CLEARED_TOKENS - 1)
    assert not record.is_suspect(10 + CLEARED_TOKENS)


def test_one_that_has_never_lost_a_decoder_is_no_suspect() -> None:
    assert not Record().is_suspect(0)


def test_the_guilty_is_found_among_innocents_of_its_first_death_that_were_cleared_meanwhile() -> None:
    guilty, innocents = Record(), [Record(), Record(), Record()]
    crash(guilty, *innocents, tokens=[3, 5, 5, 5])
    assert crash(*innocents, guilty, tokens=[60, 40, 21, 3]) == [False, False, False, True]
    assert not any(record.is_suspect(60) for record in innocents)


def test_a_cleared_turn_beside_a_fresh_killer_is_spared_and_the_killer_found() -> None:
    cleared, killer = Record(), Record()
    crash(cleared)
    assert crash(cleared, killer, tokens=[50, 3]) == [False, False]
    assert crash(killer, Record(), tokens=[3, 9]) == [True, False]
    assert not cleared.is_suspect(50 + CLEARED_TOKENS)


def test_slow_poison_that_dies_alone_is_convicted_though_it_had_been_cleared() -> None:
    record = Record()
    crash(record, tokens=[100])
    assert crash(record, tokens=[200]) == [True]


def test_slow_poison_in_ever_new_company_is_refused_in_the_end() -> None:
    record = Record()
    assert [crash(record, Record(), Record(), tokens=[100 * n, 5, 5])[0] for n in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_cleared_turns_that_meet_at_a_death_are_suspects_anew_and_none_is_refused() -> None:
    left, right = Record(), Record()
    crash(left)
    crash(right)
    assert crash(left, right, Record(), tokens=[50, 60, 5]) == [False, False, False]
    assert left.is_suspect(50)
    assert right.is_suspect(60)


def test_a_fresh_turn_beside_a_suspect_is_not_suspected() -> None:
    suspect, fresh = Record(), Record()
    crash(suspect)
    crash(suspect, fresh)
    assert fresh.deaths == 0


def test_a_death_from_outside_makes_no_cleared_turn_a_suspect() -> None:
    record = Record()
    crash(record)
    killed((record, 50))
    assert not record.is_suspect(50)


def test_the_limit_is_the_number_of_decoders_a_turn_may_cost() -> None:
    record = Record()
    assert [crash(record, limit=4)[0] for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("is_suspect", "running", "may"),
    [
        (False, [], True),
        (False, [True, True], True),
        (True, [], True),
        (True, [False, False], True),
        (True, [False, True], False),
    ],
)
def test_two_suspects_never_share_a_decoder(is_suspect: bool, running: list[bool], may: bool) -> None:
    assert may_join(is_suspect, running) is may


def test_deaths_from_outside_accuse_nobody_however_many_while_tokens_come() -> None:
    record = Record()
    for tokens in range(1, 50):
        assert killed((record, tokens)) == [False]
    assert record.deaths == 0
    assert not record.is_suspect(50)


def test_a_turn_that_loses_decoders_in_a_row_without_a_token_is_refused_in_the_end() -> None:
    record = Record()
    assert [killed((record, 7))[0] for _ in range(IDLE_LOSSES)] == [False] * (IDLE_LOSSES - 1) + [True]


def test_one_token_between_idle_losses_begins_the_row_anew() -> None:
    record = Record()
    for _ in range(IDLE_LOSSES - 1):
        killed((record, 7))
    assert killed((record, 8)) == [False]
    assert [killed((record, 8))[0] for _ in range(IDLE_LOSSES - 1)] == [False] * (IDLE_LOSSES - 2) + [True]


def test_a_death_from_outside_does_not_count_towards_the_limit_of_crashes() -> None:
    record = Record()
    crash(record)
    killed((record, 3), (Record(), 3))
    assert record.deaths == 1
    assert crash(record, tokens=[3]) == [True]
