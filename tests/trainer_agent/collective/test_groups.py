"""What trainers of a new generation have said that they have decides where each of them goes on from."""

from __future__ import annotations

import pytest

from trainer_agent.collective.groups import Group
from trireme_shared.protocol.records import TrainerList
from trireme_shared.protocol.wire.messages import PserverInfo

NAMES = ("a", "b", "c")


def said(place: int, version: int, *, kept: int | None = None, records: str = "x") -> PserverInfo:
    """`records`: those of the last versions. `kept`: the first version whose means it can give; None: that
    before its own."""
    first = max(1, version - 1) if kept is None else kept
    made_of = tuple(
        (each, f"{records}{each}") for each in range(max(0, min(first - 1, version - 2)), version + 1)
    )
    common = {"job": "j", "incarnation": "i", "generation": 7, "ready": True}
    return PserverInfo(**common, index=place, lowest=version, highest=version, kept=first, made_of=made_of)


def learned(me: str, *infos: PserverInfo, own: PserverInfo) -> Group:
    group = Group(TrainerList(generation=7, lanes=8, names=NAMES), me, 16)
    group.learn(infos, own)
    return group


def test_who_lacks_the_newest_version_gets_it_from_those_that_have_it():
    group = learned("a", said(1, 5), said(2, 5), own=said(0, 4))
    assert (group.newest, group.givers, group.other_records) == (5, [1, 2], False)


def test_who_joined_at_the_newest_version_and_has_no_means_of_it_is_not_asked_for_them():
    group = learned("a", said(1, 5, kept=6), said(2, 5), own=said(0, 4))
    assert (group.newest, group.givers) == (5, [2])


def test_if_nobody_else_has_it_the_one_that_joined_is_asked_and_says_that_it_is_gone():
    group = learned("a", said(1, 5, kept=6), said(2, 4), own=said(0, 4))
    assert (group.newest, group.givers) == (5, [1])


@pytest.mark.parametrize(("me", "other_records"), [("a", False), ("b", False), ("c", True)])
def test_of_two_versions_of_one_number_that_of_the_first_in_the_list_holds(me, other_records):
    """c was frozen with version 5; a and b have made it again, with another record."""
    everybody = {"a": said(0, 5, records="y"), "b": said(1, 4, records="y"), "c": said(2, 5)}
    group = learned(me, *(info for name, info in everybody.items() if name != me), own=everybody[me])
    assert (group.newest, group.other_records) == (5, other_records)
    if me == "b":
        assert group.givers == [0]


def test_an_older_version_of_other_records_is_noticed_too():
    group = learned("c", said(0, 6, records="y"), said(1, 6, records="y"), own=said(2, 5))
    assert (group.newest, group.other_records) == (6, True)


def test_what_is_too_old_to_be_compared_is_left_to_the_pull():
    group = learned("c", said(0, 9, records="y"), own=said(2, 5))
    assert (group.newest, group.givers, group.other_records) == (9, [0], False)
    assert learned("c", said(0, 9, kept=3), own=said(2, 5)).givers == [0]


def test_who_is_far_behind_is_compared_by_whoever_can_give_it_the_next_version():
    """The first in the list has joined not long ago."""
    new, old = said(0, 9, kept=10, records="y"), said(1, 9, kept=5, records="y")
    group = learned("c", new, old, own=said(2, 5, records="y"))
    assert (group.newest, group.givers, group.other_records) == (9, [1], False)
    assert learned("c", new, old, own=said(2, 5)).other_records
