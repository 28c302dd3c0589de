"""A resize of a running job in the simulation: the promises hold whoever dies in whichever phase, and nothing
moves in vain.

Checked beside all other invariants: a push changes a block only at the owner that etcd's slot map names at
that moment; no block is served by two parameter servers; the slot map's version only grows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from master_service.core import placement
from master_service.core.decisions import resize
from master_service.core.state.job import Job
from pserver_service.handoff import sender
from tests.equipment.cluster.network import STEADY, conditions_of
from tests.equipment.replaced import replaced
from tests.simulation.compute import Speed
from tests.simulation.plans import OperatorRequest, Plan, RequestKind, ResizeKill, Victim, plan_of
from tests.simulation.run import Outcome, simulate
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.assignments import Handed, Migration
from trireme_shared.protocol.records.operations import OperationState, ResizePhase
from trireme_shared.serving.core import ledger, moving
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.rows import TableRows

SMALL_GROUP_BYTES = 1600  # so that a resize of the small model moves several groups
WITH_SKETCHES_BYTES = 1 << 17  # the same, of slots with sketches
ROWS_BYTES = (
    1 << 17
)  # that asynchronous tables, which have none, say they have: else hardly a slot would move for their sake
MOMENTS = [
    (ResizePhase.STARTING, 0),
    (ResizePhase.MIGRATING, 0),
    (ResizePhase.MIGRATING, 1),
    (ResizePhase.COMMITTED, 0),
]


def resized(seed: int, mode: Mode, *, restart: bool = False) -> Plan:
    """A job that is resized twice, drawn from the seed."""
    rng = random.Random(f"resize-{mode}-{seed}")
    numbers = [(rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4])) for _ in range(2)]
    drawn = plan_of(seed, mode)
    lanes = 4 if mode is Mode.SYNC else 1
    job = replace(
        drawn.job, files=(7, 1, 16, 5), task_records=4, minibatch=2, lanes=lanes, epochs=4, push_every=1
    )
    job = job if restart else replace(job, tables=seed % 2 == 0)
    requests = [
        OperatorRequest(at_s, RequestKind.RESIZE, members=members, restart=restart)
        for at_s, members in zip((3.0, 8.0), numbers, strict=True)
    ]
    return replace(
        drawn,
        job=job,
        speed=Speed(0.1, 0.2),
        conditions=STEADY,
        faults=(),
        requests=tuple(requests),
        trainers=2,
        pservers=rng.choice([1, 2, 3]),
        independent=False,
        skip_after_s=None,
        checkpoint_every_s=2.0 if mode is Mode.ASYNC else None,
    )


def growing(seed: int, mode: Mode) -> Plan:
    """From one parameter server to three."""
    plan = resized(seed, mode)
    return replace(plan, pservers=1, requests=(replace(plan.requests[0], members=(3, 2)),))


def played(plan: Plan) -> Outcome:
    if plan.job.tables and plan.job.mode is Mode.ASYNC:
        with (
            replaced(placement, "GROUP_BYTES", ROWS_BYTES // 8),
            replaced(TableRows, "handed_bytes", ROWS_BYTES),
        ):
            return simulate(plan.seed, plan.job.mode, plan=plan)
    with replaced(placement, "GROUP_BYTES", WITH_SKETCHES_BYTES if plan.job.tables else SMALL_GROUP_BYTES):
        return simulate(plan.seed, plan.job.mode, plan=plan)


def kept(outcome: Outcome) -> Outcome:
    assert not outcome.violations, "\n".join([str(outcome.plan), *outcome.violations[:6]])
    return outcome


@pytest.mark.parametrize(
    ("mode", "seeds"), [(Mode.SYNC, (0, 1)), (Mode.ASYNC, (1, 2))]
)  # both resizes come before the end
def test_an_undisturbed_resize_moves_no_byte_in_vain(mode, seeds):
    moved = 0
    for seed in seeds:
        plan = resized(seed, mode)
        for operation in kept(played(plan)).operations:
            found = operation.resize
            assert found is not None
            if operation.state is OperationState.DONE:
                assert found.phase is ResizePhase.COMMITTED
                assert found.groups_moved == found.groups
                # rows come and go, so only about how many bytes they have is known before
                if not plan.job.tables:
                    assert found.bytes_moved == found.bytes
                moved += found.groups_moved
            else:
                assert "the job is COMPLETED" in operation.reason
    assert moved > 5


def test_a_ledger_that_travels_in_pieces_keeps_every_promise():
    with replaced(moving, "LEDGER_BYTES", 40), replaced(sender, "LEDGER_BYTES", 40):
        for seed, victim in ((1, Victim.TARGET), (2, Victim.SOURCE)):
            kill = ResizeKill(ResizePhase.MIGRATING, victim, 1, 0.005, 1.0)
            kept(played(replace(growing(seed, Mode.ASYNC), kills=(kill,))))


@pytest.mark.parametrize("victim", list(Victim))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_whoever_dies_in_whichever_phase(mode, victim):
    struck = 0
    for number, (phase, moved) in enumerate(MOMENTS):
        rng = random.Random(f"{mode}-{victim}-{number}")
        kill = ResizeKill(
            phase, victim, moved, rng.choice([0.0, 0.005, 0.02, 0.1]), rng.choice([0.1, 1.0, 4.0])
        )
        plan = replace(growing(number, mode), kills=(kill,), masters=rng.choice([1, 2]))
        tables = (number + list(Victim).index(victim)) % 2 == 0
        epochs = 4 if mode is Mode.SYNC else 3  # steps: else it is over before the last kill
        struck += kept(played(replace(plan, job=replace(plan.job, tables=tables, epochs=epochs)))).injected
    assert struck >= len(MOMENTS) - 1


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 120, 20)], ids=str)
@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_under_kills_faults_and_bad_networks(mode, seeds):
    for seed in seeds:
        kept(played(stormy(seed, mode)))


@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_under_kills_faults_and_bad_networks_in_short(mode):
    for seed in range(100, 102):
        kept(played(stormy(seed, mode)))


def stormy(seed: int, mode: Mode) -> Plan:
    """Two resizes, the faults and requests of the seed, and one or two kills at moments of a resize."""
    rng = random.Random(f"storm-{mode}-{seed}")
    plan, drawn = resized(seed, mode), plan_of(seed, mode)
    kills = [_kill(rng) for _ in range(rng.choice([1, 1, 2]))]
    requests = tuple(sorted((*plan.requests, *drawn.requests), key=lambda request: request.at_s))
    return replace(
        plan,
        kills=tuple(kills),
        masters=2,
        conditions=conditions_of(rng),
        faults=drawn.faults,
        requests=requests,
    )


def _kill(rng: random.Random) -> ResizeKill:
    phase, moved = rng.choice(MOMENTS)
    return ResizeKill(
        phase, rng.choice(list(Victim)), moved, rng.choice([0.0, 0.005, 0.1]), rng.choice([0.1, 1.0, 4.0])
    )


@pytest.mark.parametrize("mode", list(Mode))
def test_a_resize_by_restart_gives_the_same_parameters(mode):
    done = 0
    for seed in range(2):
        outcome = kept(played(resized(seed, mode, restart=True)))
        done += sum(operation.state is OperationState.DONE for operation in outcome.operations)
    assert done >= 2


# -------------------------------------------------------------------- ablations


def test_without_the_migrations_name_what_was_handed_over_for_another_one_counts():
    def any_migration(job: Job, _: Migration, index: int) -> Handed:
        member = job.members.pservers.get(index)
        return (member.handed if member is not None else None) or Handed(migration="none")

    without_leader = ResizeKill(
        ResizePhase.MIGRATING, Victim.LEADER, 0, 0.0, 4.0
    )  # so the target dies before it counts
    target = ResizeKill(ResizePhase.MIGRATING, Victim.TARGET, 0, 1.5, 0.1)
    _is_missed(
        lambda: replaced(resize, "handed_of", any_migration), Mode.SYNC, without_leader, target, first=1
    )


@pytest.mark.parametrize(("mode", "first"), [(Mode.SYNC, 7), (Mode.ASYNC, 0)])
def test_without_the_freeze_pushes_are_lost_between_the_last_copy_and_the_new_owner(mode, first):
    _is_missed(lambda: replaced(BlockState, "takes", lambda *_: True), mode, first=first)


def test_without_rows_that_wait_for_the_norm_a_job_stops_or_goes_back_to_a_step_without_it():
    """A parameter server that has rows and no blocks made the record of a step before it knew the norm, and
    wrote the manifest."""

    settle_rows = Store.settle_rows

    def at_once(store: Store) -> bool:
        if store.blocks or store.rows is None:
            return settle_rows(store)
        store.stepped(store.rows)
        return True

    for seed in (10, *range(12)):
        plan = growing(seed, Mode.SYNC)
        job = replace(plan.job, tables=True, clip_grad_norm=0.5, epochs=2)
        plan = replace(plan, job=job, checkpoint_every=1, conditions=replace(STEADY, high_s=0.02))
        with replaced(Store, "settle_rows", at_once), replaced(Plan, "bound_s", property(lambda _: 12.0)):
            broken = played(plan).violations
        missed = (
            "not over",
            "grad_norm is stored of steps",
            "two checkpoints of step",
        )  # the last: one with the norm, one without
        if any(line.startswith(missed) for line in broken) and not played(plan).violations:
            return
    pytest.fail("no norm was missing without it")


def alike(rows):
    """Slots have had what the first of them have had, wherever they come from."""
    return [(*rows[0][:2], sum(bits for _, _, bits in rows))] if rows else []


def test_without_the_ledger_of_slots_that_came_rows_of_an_asynchronous_job_lose_minibatches():
    _is_missed(lambda: replaced(ledger, "_alike", alike), Mode.ASYNC, tables=True, first=1)


def _is_missed(
    ablation: Callable, mode: Mode, *kills: ResizeKill, tables: bool | None = None, first: int = 0
) -> None:
    for seed in (first, *range(12)):
        slow = replace(STEADY, high_s=0.05)  # so that steps fall into the time of a hand-over
        plan = replace(growing(seed, mode), kills=kills, masters=1, conditions=slow)
        if tables is not None:
            plan = replace(plan, job=replace(plan.job, tables=tables))
        with ablation():
            broken = played(plan).violations
        if broken and not played(plan).violations:
            return
    pytest.fail("no promise was broken without it")
