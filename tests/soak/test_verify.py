"""The soak's own checks can fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.soak.inflict import Cost
from tests.soak.plan import Fault, Kind
from tests.soak.run import STEPS_PER_EPOCH, SoakError, Trained
from tests.soak.verify import (
    LOSS_BOUND_S,
    check_bits,
    check_exactly_once,
    check_history,
    check_ledgers,
    check_losses,
    check_records,
)
from trireme.cli.chaos import Receipt

EPOCHS = 2
RECORDS = Counter({"a": 1, "b": 3})
ALL = Counter({"a": 2, "b": 6})
SUMMARY = {"records": 8, "discarded": {"records": 0}, "losses": {"lost": {"1": 5}, "skipped": {"1": 1}}}
WANTED = EPOCHS * STEPS_PER_EPOCH
GOOD = Trained(
    {"w": torch.ones(2)}, SUMMARY, RECORDS, ALL, (), {0: (WANTED, WANTED), 1: (WANTED - 6, WANTED - 6)}
)


def test_a_good_run_passes():
    check_bits(GOOD, GOOD)
    check_exactly_once(GOOD, EPOCHS)
    check_ledgers(GOOD, EPOCHS)
    check_records(replace(GOOD, computed=ALL + Counter({"a": 3})), EPOCHS)


@pytest.mark.parametrize("changed", [torch.tensor([1.0, 1.0000001]), torch.ones(3)])
def test_one_bit_is_seen(changed):
    with pytest.raises(SoakError, match="1 of 1 parameters differ"):
        check_bits(GOOD, replace(GOOD, parameters={"w": changed}))


def test_a_record_that_was_never_computed_or_once_too_often_is_seen():
    with pytest.raises(SoakError, match="1 records were never computed"):
        check_records(replace(GOOD, computed=ALL - Counter("a")), EPOCHS)
    with pytest.raises(SoakError, match="1 too many"):
        check_exactly_once(replace(GOOD, computed=ALL + Counter("a")), EPOCHS)


@pytest.mark.parametrize("summary", [SUMMARY | {"records": 7}, SUMMARY | {"discarded": {"records": 1}}])
def test_a_count_that_is_off_is_seen(summary):
    with pytest.raises(SoakError, match="expected 8 records, none discarded"):
        check_records(replace(GOOD, summary=summary), EPOCHS)


@pytest.mark.parametrize(
    "applied",
    [
        {},
        {0: (WANTED - 1, WANTED)},
        {0: (WANTED, WANTED + 1)},
        {1: (WANTED, WANTED)},
    ],
)
def test_a_minibatch_that_was_applied_twice_or_lost_without_record_is_seen(applied):
    with pytest.raises(SoakError, match=r"its blocks applied|told its ledger"):
        check_ledgers(replace(GOOD, applied=applied), EPOCHS)


HISTORY = replace(GOOD, history=[(0, 3.0), (1, 1.0), (2, 3.0), (3, 1.0)], epochs=[(0, 4.0), (2, 4.0)])


def test_a_history_with_each_step_once_and_all_records_of_each_epoch_passes():
    check_history(HISTORY, EPOCHS)
    check_records(HISTORY, EPOCHS)


@pytest.mark.parametrize(
    "changed",
    [
        {"history": []},
        {"history": [*HISTORY.history[:2], HISTORY.history[3]]},
        {"history": [*HISTORY.history, HISTORY.history[3]]},
        {"history": [(0, 3.0), (1, 2.0), (2, 3.0), (3, 0.0)]},
        {"epochs": HISTORY.epochs[:1]},
        {"epochs": [(0, 4.0), (2, 3.0)]},
    ],
)
def test_a_history_that_lacks_a_step_or_a_record_of_an_epoch_is_seen(changed):
    with pytest.raises(SoakError, match=r"steps are missing|each of 2 epochs"):
        check_records(replace(HISTORY, **changed), EPOCHS)


def cost(began: float, ended: float, lost: int) -> Cost:
    receipt = Receipt("soak", "pserver-0", 1, updates_lost={"pserver-0": lost})
    return Cost(Fault(Kind.KILL_PSERVER, ("pserver-0",), 0.0, 0.0), receipt, None, began=began, ended=ended)


def test_a_loss_above_the_bound_is_seen():
    trained = replace(GOOD, times=[float(number) for number in range(1000)])
    within = int(LOSS_BOUND_S) + 3
    check_losses(trained, [cost(500.0, 502.0, within)])
    with pytest.raises(SoakError, match=f"lost {within + 1} minibatches"):
        check_losses(trained, [cost(500.0, 502.0, within + 1)])
    check_losses(trained, [cost(490.0, 495.0, 0), cost(500.0, 502.0, within + 5)])
    with pytest.raises(SoakError, match="lost"):
        check_losses(trained, [cost(400.0, 405.0, 0), cost(500.0, 502.0, within + 5)])
