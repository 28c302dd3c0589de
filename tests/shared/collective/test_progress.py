"""Members never disagree about an operation, whatever dies, freezes, comes back or joins: a model of epochs,
run at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from trireme_shared.collective import session
from trireme_shared.collective.records import Done, Statement
from trireme_shared.collective.session import STATE, Line, Progress, Result


def statement(last, before=(0, 0), *, gives=True, has_state=True) -> Statement:
    return Statement(
        manifest={},
        last=Done(number=last[0], epoch=last[1]),
        before=Done(number=before[0], epoch=before[1]),
        gives=gives,
        has_state=has_state,
    )


def test_who_has_the_last_result_gives_it_and_whoever_is_new_needs_the_state():
    line = Line.of(
        [
            statement((5, 3), (4, 3)),
            statement((6, 3), (5, 3)),
            statement((5, 3), (4, 3)),
            statement((0, 0), has_state=False),
        ]
    )
    assert line.head == Done(number=6, epoch=3)
    assert (line.behind, line.giver, line.root) == ((0, 2), 1, 0)
    assert line.lost == line.stateless == {3}


def test_a_member_that_comes_back_with_another_result_of_the_same_operation_is_lost():
    line = Line.of([statement((6, 9), (5, 3)), statement((6, 3), (5, 3))])
    assert line.lost == {1}


def test_a_member_that_comes_back_before_the_others_operation_gets_its_result():
    line = Line.of([statement((6, 9), (5, 3)), statement((5, 3), (4, 3))])
    assert (line.lost, line.behind, line.giver) == (frozenset(), (1,), 0)


def test_a_beginning_has_no_history_and_rank_0_gives_the_state():
    line = Line.of([statement((0, 0), has_state=False)] * 3)
    assert (line.head, line.root, line.behind) == (Done(number=0, epoch=0), 0, ())
    assert line.stateless == {0, 1, 2}


def test_new_members_alone_begin_another_history_than_those_who_had_the_state():
    line = Line.of([statement((6, 13), gives=False, has_state=False)])
    assert (line.head, line.stateless) == (Done(number=0, epoch=0), {0})


@dataclass
class Process:
    """`log`: what its caller knows, by number of the operation; new members take over the log with the
    state."""

    progress: Progress = field(default_factory=Progress)
    log: dict[int, int] = field(default_factory=dict)

    def hears(self, giver: Process) -> None:
        """Its caller gets the result that others gave."""
        if not self.progress.delivered:
            self.progress.delivered = True
            if self.progress.last.kind == STATE:
                self.log = dict(giver.log)
            self.learns()

    def learns(self) -> None:
        done = self.progress.last.done
        self.log[done.number] = done.epoch


def history(seed: int) -> None:
    """Raises AssertionError where two members with the group's state have different results of one
    operation."""
    chance = random.Random(seed)
    epoch, group, away = 0, [Process(), Process(), Process()], []
    for _ in range(40):
        epoch += chance.randrange(1, 4)
        line = Line.of([each.progress.state({}, None, "") for each in group])
        given = group[line.giver].progress.last if line.behind else None
        for rank, each in enumerate(group):
            each.progress.enter(line, rank, epoch, given)
            each.hears(group[line.giver])
        root = group[line.root]
        logs = [each.log for each in group if each.progress.has_state]
        assert all(log == logs[0] for log in logs)
        if not logs:
            for each in group:
                each.log = {}
        for _ in range(chance.randrange(3)):
            number = group[0].progress.last.done.number + 1
            assert {each.progress.last.done.number for each in group} == {number - 1}
            stateless = [each for each in group if not each.progress.has_state]
            kind = STATE if stateless and len(group) > 1 else "allreduce"
            done_by = group if chance.random() < 0.5 else chance.sample(group, chance.randrange(len(group)))
            for each in done_by:
                if kind == STATE:
                    each.log = dict(root.log)
                each.progress.finish(
                    Result(Done(number=number, epoch=epoch), kind, flats=[torch.zeros(1)]), delivered=True
                )
                each.progress.has_state = True
                each.learns()
            if len(done_by) < len(group):
                break
        left = [each for each in group if chance.random() < 0.25][: len(group) - 1]  # frozen, taken for dead
        group = [each for each in group if each not in left]
        back = [each for each in away if chance.random() < 0.5]
        away = [each for each in [*away, *left] if each not in back and chance.random() < 0.8]
        group += [*back, *(Process() for _ in range(chance.randrange(2)))]


SEEDS = range(60)


def test_survivors_agree_about_every_operation_under_random_histories():
    for seed in SEEDS:
        history(seed)


@pytest.mark.parametrize("lost", ["epochs", "results"])
def test_ablation_members_disagree_without(lost, monkeypatch):
    """Without the epoch in an operation's name, and where nobody gives the result that he has."""
    if lost == "epochs":
        monkeypatch.setattr(
            Progress,
            "state",
            lambda self, *_: statement(
                (self.last.done.number, 1 if self.last.done.epoch else 0),
                (self.before.number, 1 if self.before.epoch else 0),
                gives=self.last.flats is not None,
                has_state=self.has_state,
            ),
        )
    else:
        monkeypatch.setattr(session.Progress, "enter", without_giving(session.Progress.enter))
    assert any(disagrees(seed) for seed in SEEDS)


def without_giving(enter):
    def changed(self, line, rank, epoch, given):
        if rank in line.behind:
            self.adopt(line.head, has_state=self.has_state)
        else:
            enter(self, line, rank, epoch, None)

    return changed


def disagrees(seed: int) -> bool:
    try:
        history(seed)
    except AssertionError:
        return True
    return False
