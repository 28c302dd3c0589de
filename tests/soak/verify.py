"""Whether a disturbed job has lost or repeated anything."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

import torch

from master_service.control.pause_runner import seconds_between
from tests.soak.inflict import Cost
from tests.soak.plan import LEASE_S
from tests.soak.run import CHECKPOINT_EVERY_S, STEPS_PER_EPOCH, SoakError, Trained
from trireme.cli.doctor import LATE_EXPIRY_S

# as `trireme doctor` prints it for the default settings
LOSS_BOUND_S = seconds_between(CHECKPOINT_EVERY_S, frozen_s=LEASE_S + LATE_EXPIRY_S)


def verify(left_alone: Trained | None, broken: Trained, costs: Sequence[Cost], epochs: int) -> None:
    """Raises SoakError if anything is not as promised. `left_alone`: the undisturbed run of a synchronous
    job."""
    check_records(broken, epochs)
    if lost := [str(cost) for cost in costs if cost.receipt.records_lost]:
        raise SoakError(f"records were lost: {lost}")
    if left_alone is not None:
        check_bits(left_alone, broken)
    else:
        check_ledgers(broken, epochs)
        check_losses(broken, costs)


def check_bits(left_alone: Trained, broken: Trained, whose: str = "the undisturbed run's") -> None:
    one, other = left_alone.parameters, broken.parameters
    different = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    if different or one.keys() != other.keys():
        raise SoakError(f"{len(different)} of {len(one)} parameters differ from {whose}: {different[:3]}")


def check_exactly_once(left_alone: Trained, epochs: int) -> None:
    """An undisturbed run of one trainer computes each record exactly once an epoch. (Of several, one may help
    another that is late.)"""
    check_records(left_alone, epochs)
    if left_alone.computed != _expected(left_alone, epochs):
        surplus = (left_alone.computed - _expected(left_alone, epochs)).total()
        raise SoakError(f"the undisturbed run computed other records: {surplus} too many")


def check_records(trained: Trained, epochs: int) -> None:
    """A disturbed run may compute a record more often (what was not committed is computed again), never less
    often. Its own summary counts each once, and its equal bits say that each took effect exactly once."""
    expected = _expected(trained, epochs)
    if not trained.computed >= expected:
        raise SoakError(f"{(expected - trained.computed).total()} records were never computed")
    if trained.summary["records"] != expected.total() or trained.summary["discarded"]["records"]:
        raise SoakError(f"expected {expected.total()} records, none discarded: {trained.summary}")
    if trained.history is not None:
        check_history(trained, epochs)


def check_history(trained: Trained, epochs: int) -> None:
    """What the job has written of its steps: each step once, none is missing, and those of each epoch have
    all its records."""
    history = trained.history or ()
    steps = [step for step, _ in history]
    if steps != list(range(len(steps))):
        surplus, wanted = Counter(steps), Counter(range(max(steps, default=-1) + 1))
        raise SoakError(
            f"steps are missing {sorted(wanted - surplus)[:5]} or twice {sorted(surplus - wanted)[:5]}"
        )
    firsts = [first for first, _ in trained.epochs]
    ends = [*firsts[1:], len(steps)]
    counted = [
        sum(records for _, records in history[first:end]) for first, end in zip(firsts, ends, strict=True)
    ]
    wanted_records = trained.windows.total()
    told = [records for _, records in trained.epochs]
    if len(counted) != epochs or {*counted, *told} != {wanted_records}:
        raise SoakError(
            f"each of {epochs} epochs has {wanted_records} records; steps have {counted}, epochs {told}"
        )


def check_ledgers(trained: Trained, epochs: int) -> None:
    """At each parameter server every minibatch was applied once to every block, or its loss is on record."""
    losses = trained.summary["losses"]
    wanted = epochs * STEPS_PER_EPOCH
    for index, (lowest, highest) in trained.applied.items():
        lost, skipped = (losses[cause].get(str(index), 0) for cause in ("lost", "skipped"))
        if not lowest <= highest <= wanted or lowest + lost + skipped != wanted:
            raise SoakError(
                f"pserver {index}: its blocks applied {lowest} to {highest} of {wanted} minibatches, "
                f"on record are {lost} lost, {skipped} skipped"
            )
    if not trained.applied:
        raise SoakError("no parameter server told its ledger")


def check_losses(trained: Trained, costs: Sequence[Cost]) -> None:
    """A parameter server that comes back lacks at most what was computed in LOSS_BOUND_S before its death.
    Faults that fell into that time may have delayed checkpoints: their own time is added."""
    for number, cost in enumerate(costs):
        since = cost.began - LOSS_BOUND_S
        for earlier in reversed(costs[:number]):
            since -= earlier.ended - earlier.began if earlier.ended > since else 0.0
        computed = bisect_right(trained.times, cost.ended) - bisect_left(trained.times, since)
        for name, lost in cost.receipt.updates_lost.items():
            if lost > computed:
                raise SoakError(
                    f"{name} lost {lost} minibatches, only {computed} were computed since "
                    f"{since:.1f} s: {cost}"
                )


def _expected(trained: Trained, epochs: int) -> Counter[str]:
    return Counter({window: count * epochs for window, count in trained.windows.items()})
