"""The ledger of asynchronous training: each minibatch is applied to each block exactly once, whatever is sent
twice, late or anew."""

import random
from collections import Counter

import pytest
import torch

from tests.pserver_service.jobs import (
    async_header,
    check_invariants,
    initialised,
    item,
    layout_of,
    payload_of,
    stream,
)
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.wire.messages import EpochLedger, LedgerAnswer, LedgerQuery, PushBlock, Verdict
from trireme_shared.serving.core.ledger import Ledger

PLAIN = OptimizerSpec(name="SGD", defaults={"lr": 1.0}, groups=({},))


def applied(ledger: Ledger, header, block: int) -> Verdict:
    verdict = ledger.judge(header, int(header.task_id), block)
    if verdict is Verdict.APPLIED:
        ledger.enter(header, int(header.task_id), block)
    return verdict


@pytest.mark.parametrize("seed", range(40))
def test_every_minibatch_is_applied_to_every_block_exactly_once(seed):
    """Trainers push tasks in ranges, die in the middle, are re-dispatched at the lowest entry; zombies and
    networks repeat."""
    rng = random.Random(seed)
    blocks, push_every, epochs = rng.randint(1, 4), rng.randint(1, 3), 3
    ledger, done, sizes = Ledger(blocks), Counter(), [rng.randint(1, 9) for _ in range(5)]
    sent = []

    def push(epoch, task, attempt, start, block):
        end = min(start + push_every, sizes[task])
        header = async_header(task, start, end, sizes[task], attempt, epoch=epoch)
        if applied(ledger, header, block) is Verdict.APPLIED:
            done.update((epoch, task, number, block) for number in range(start, end))
        sent.append((epoch, task, attempt, start, block))

    for epoch in range(epochs):
        for task in rng.sample(range(5), 5):
            for attempt in range(1, 50):
                dies_after = rng.randint(0, 8) if attempt < 6 else 10**6
                for start in range(ledger.next_of(epoch, task).next, sizes[task], push_every):
                    for block in rng.sample(range(blocks), blocks):
                        if dies_after:
                            push(epoch, task, attempt, start, block)
                            dies_after -= 1
                        for _ in range(rng.randint(0, 2)):
                            push(*rng.choice(sent)) if sent else None
                if ledger.next_of(epoch, task).closed:
                    break
    everything = [
        (e, t, n, b) for e in range(epochs) for t in range(5) for n in range(sizes[t]) for b in range(blocks)
    ]
    assert done == Counter(everything)
    for counts in ledger.counts():
        assert (counts.applied_lowest, counts.applied_highest) == (sum(sizes), sum(sizes))
        assert (counts.tasks_closed, counts.tasks_open) == (5, 0)


def test_a_range_before_the_next_is_a_duplicate_and_one_behind_it_comes_too_early():
    ledger = Ledger(2)
    assert applied(ledger, async_header(7, 0, 2, 6), 0) is Verdict.APPLIED
    assert applied(ledger, async_header(7, 0, 2, 6), 0) is Verdict.DUPLICATE
    assert applied(ledger, async_header(7, 4, 6, 6), 0) is Verdict.TOO_EARLY
    assert applied(ledger, async_header(7, 2, 4, 6), 0) is Verdict.APPLIED
    assert ledger.next_of(0, 7) == LedgerAnswer(next=0)
    assert applied(ledger, async_header(7, 0, 2, 6), 1) is Verdict.APPLIED
    assert ledger.next_of(0, 7) == LedgerAnswer(next=2)


def test_a_higher_attempt_fences_the_lower_ones():
    ledger = Ledger(2)
    applied(ledger, async_header(7, 0, 1, 2, attempt=2), 0)
    assert applied(ledger, async_header(7, 1, 2, 2, attempt=1), 0) is Verdict.STALE_ATTEMPT
    assert applied(ledger, async_header(7, 0, 1, 2, attempt=1), 1) is Verdict.STALE_ATTEMPT
    assert applied(ledger, async_header(7, 0, 1, 2, attempt=3), 1) is Verdict.APPLIED


def test_a_task_is_closed_when_every_block_has_all_of_it():
    ledger = Ledger(2)
    applied(ledger, async_header(5000, 0, 3, 3), 0)
    assert ledger.next_of(0, 5000) == LedgerAnswer(next=0, closed=False)
    applied(ledger, async_header(5000, 0, 3, 3), 1)
    assert ledger.next_of(0, 5000) == LedgerAnswer(closed=True)
    assert applied(ledger, async_header(5000, 0, 3, 3, attempt=9), 1) is Verdict.DUPLICATE
    assert ledger.counts() == (
        EpochLedger(epoch=0, applied_lowest=3, applied_highest=3, tasks_closed=1, tasks_open=0, duplicates=1),
    )


def test_old_epochs_keep_only_their_counts():
    ledger = Ledger(1)
    for epoch in range(5):
        applied(ledger, async_header(1, 0, 2, 2, epoch=epoch), 0)
    assert applied(ledger, async_header(2, 0, 2, 2, epoch=1), 0) is Verdict.DUPLICATE
    assert [(b.epoch, b.applied_lowest, b.tasks_closed, b.duplicates) for b in ledger.counts()] == [
        (0, 2, 1, 0), (1, 2, 1, 1), (2, 2, 1, 0), (3, 2, 1, 0), (4, 2, 1, 0),
    ]  # fmt: skip
    assert [ledger.detail_of(epoch) is not None for epoch in range(5)] == [False, False, False, True, True]
    assert ledger.next_of(1, 2).closed


def test_a_million_closed_tasks_take_little_memory():
    ledger = Ledger(1)
    for task in range(0, 1_000_000, 10_000):
        for near in range(3):
            applied(ledger, async_header(task + near, 0, 1, 1), 0)
    detail = ledger.detail_of(0)
    assert detail.closed_count == 300
    assert not detail.open
    assert len(detail.closed) == 100


def test_a_task_whose_length_changes_is_refused():
    ledger = Ledger(1)
    applied(ledger, async_header(1, 0, 1, 4), 0)
    assert applied(ledger, async_header(1, 1, 2, 5), 0) is Verdict.BAD_FRAME


async def test_async_gradients_are_applied_on_arrival_and_once():
    pserver, values = await initialised(layout_of(20, optimizer=PLAIN), Mode.ASYNC)
    ones = torch.ones(16)
    for _ in range(3):
        answer = await pserver.push(async_header(3, 0, 1, 2), stream(item(0, ones), item(1, ones[:4])))
    assert (answer.applied, answer.duplicate) == (0, 2)
    answer = await pserver.push(
        async_header(3, 1, 2, 2, lane_zero=None), stream(item(0, ones), item(1, ones[:4]))
    )
    assert answer.applied == 2
    for number, block in pserver.store.blocks.items():
        assert torch.equal(block.current.tensor, values[number] - 1 - 1)
    info = await pserver.info()
    assert (info.lowest, info.highest, info.updates) == (2, 2, 4)
    assert info.ledger == (
        EpochLedger(epoch=0, applied_lowest=2, applied_highest=2, tasks_closed=1, tasks_open=0, duplicates=4),
    )
    assert await pserver.ledger(LedgerQuery(epoch=0, task_id="3")) == LedgerAnswer(closed=True)
    assert await pserver.ledger(LedgerQuery(epoch=0, task_id="4")) == LedgerAnswer()
    check_invariants(pserver)


async def test_an_empty_async_push_moves_the_ledger_and_no_value():
    pserver, values = await initialised(layout_of(4, optimizer=PLAIN), Mode.ASYNC)
    answer = await pserver.push(async_header(0, 0, 1, 2), stream((PushBlock(block=0, count=0), b"")))
    assert answer.applied == 1
    assert torch.equal(pserver.store.blocks[0].current.tensor, values[0])
    assert (await pserver.ledger(LedgerQuery(epoch=0, task_id="0"))).next == 1


async def test_an_async_push_waits_for_what_comes_before_it():
    pserver, values = await initialised(layout_of(4, optimizer=PLAIN), Mode.ASYNC)
    answer = await pserver.push(async_header(0, 1, 2, 2), stream(item(0, torch.ones(4))))
    assert [refusal.code for refusal in answer.refused] == ["TOO_EARLY"]
    assert torch.equal(pserver.store.blocks[0].current.tensor, values[0])


@pytest.mark.parametrize(
    ("task", "start", "end", "minibatches"),
    [
        ("export-0", 0, 1, 1),
        ("", 0, 1, 1),
        ("-1", 0, 1, 1),
        (str(10**18), 0, 1, 1),
        ("1", 1, 1, 2),
        ("1", -1, 1, 2),
        ("1", 0, 3, 2),
    ],
)
async def test_ranges_that_make_no_sense_are_refused(task, start, end, minibatches):
    pserver, _ = await initialised(layout_of(4, optimizer=PLAIN), Mode.ASYNC)
    with pytest.raises(BadFrame, match="expected a task number and 0 <= start < end <= minibatches"):
        await pserver.push(async_header(task, start, end, minibatches), stream(item(0, torch.ones(4))))
    assert payload_of(torch.ones(1)) == b"\x00\x00\x80?"


def had(*pushes: tuple[int, int], slots: tuple[int, ...], minibatches: int = 2) -> Ledger:
    """A ledger of rows alone, whose slots have had these (task, minibatch)."""
    ledger = Ledger(0, slots)
    for task, start in pushes:
        for position in ledger.rows:
            assert (
                applied(ledger, async_header(task, start, start + 1, minibatches), position)
                is Verdict.APPLIED
            )
    return ledger


def test_slots_bring_what_they_have_had_and_keep_a_position_of_their_own_while_it_differs():
    source, target = had((0, 0), (0, 1), (1, 0), slots=(0b1111,)), had((0, 0), slots=(0b110000,))
    both = Ledger.joined([(target.part((), 0b110000, stays=True), 0), (source.part((), 0b11), 0)])
    assert both.slots == (0b110000, 0b11)
    assert [applied(both, async_header(0, 1, 2, 2), position) for position in both.rows] == [
        "APPLIED",
        "DUPLICATE",
    ]
    assert [applied(both, async_header(1, 0, 1, 2), position) for position in both.rows] == [
        "APPLIED",
        "DUPLICATE",
    ]
    assert [both.next_of(0, task) for task in (0, 1)] == [LedgerAnswer(closed=True), LedgerAnswer(next=1)]
    again = Ledger.joined([(both.part((), 0b110011, stays=True), 0)])
    assert again.slots == (0b110011,)  # they are even now
    staying = Ledger.joined([(source.part((), 0b1100, stays=True), 0)])
    assert (staying.slots, staying.next_of(0, 1)) == ((0b1100,), LedgerAnswer(next=1))


def test_slots_that_have_had_the_same_are_alike_though_a_task_waits_for_others_at_one_of_them():
    ahead = Ledger(1, (0b1,))
    for start in (0, 1):
        applied(ahead, async_header(0, start, start + 1, 2), 1)  # its block has had nothing
    closed = had((0, 0), (0, 1), slots=(0b10,))
    assert Ledger.joined([(ahead.part((), 0b1), 0), (closed.part((), 0b10), 0)]).slots == (0b11,)


def test_rows_that_move_into_an_epoch_that_is_over_elsewhere_have_counts_of_it_only():
    source, target = had((0, 0), (0, 1), slots=(0b1,)), Ledger(0, (0b10,))
    for epoch in range(3):
        for start in (0, 1):
            applied(target, async_header(0, start, start + 1, 2, epoch=epoch), 0)
    for epoch in (1, 2):
        applied(source, async_header(0, 0, 1, 2, epoch=epoch), 0)
    joined = Ledger.joined([(target.part((), 0b10, stays=True), 0), (source.part((), 0b1), 0)])
    assert [entry.epoch for entry in joined.counts()] == [0, 1, 2]
    assert joined.slots == (0b10, 0b1)
    assert joined.next_of(0, 0).closed
    assert (joined.next_of(1, 0), joined.next_of(2, 0)) == (LedgerAnswer(next=1), LedgerAnswer(next=1))


def test_counts_of_duplicates_stay_where_they_were_counted():
    ledger = had((0, 0), slots=(0b11,))
    applied(ledger, async_header(0, 0, 1, 2), 0)
    counted = [
        Ledger.joined([(ledger.part((), 0b1, stays=stays), 0)]).counts()[0].duplicates
        for stays in (True, False)
    ]
    assert counted == [1, 0]


def test_a_part_that_slept_through_an_epoch_takes_no_counts_from_the_others():
    """It came back from an older checkpoint: it knows epoch 0 in detail and nothing of epoch 1; for the other
    epoch 0 is old."""
    behind, ahead = Ledger(1), Ledger(1)
    applied(behind, async_header(0, 0, 1, 2), 0)
    for epoch in (0, 1):
        for start in (0, 1):
            applied(ahead, async_header(0, start, start + 1, 2, epoch=epoch), 0)
    for ledger in (behind, ahead):
        applied(ledger, async_header(0, 0, 1, 2, epoch=2), 0)
    for parts in ([behind, ahead], [ahead, behind]):
        saved = [ledger.saved() for ledger in parts]
        joined = Ledger.loaded([(each, 0) for each in saved])
        counts = {entry.epoch: (entry.applied_lowest, entry.applied_highest) for entry in joined.counts()}
        assert counts == {0: (1, 2), 1: (0, 2), 2: (1, 1)}
        assert applied(joined, async_header(0, 0, 1, 2), 0) is Verdict.DUPLICATE, "the epoch is over"
        assert applied(joined, async_header(0, 0, 1, 2), 1) is Verdict.DUPLICATE, "the epoch is over"


def test_counts_of_duplicates_of_old_epochs_stay_where_they_were_counted():
    ledger = had((0, 0), slots=(0b11,))
    applied(ledger, async_header(0, 0, 1, 2), 0)
    for epoch in (1, 2):
        applied(ledger, async_header(0, 0, 1, 2, epoch=epoch), 0)
    staying, moved = ledger.part((), 0b1, stays=True), ledger.part((), 0b10)
    assert Ledger.joined([(staying, 0), (moved, 0)]).counts()[0].duplicates == 1
