"""What trainers give to a native exchange, the buckets it travels in, and the tree that is made of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer_agent.collective.native.link import NativeStatement, backend_of, check_alike
from trainer_agent.collective.native.reducing import Told, ToldNode, chosen, covers, mean_over, read_told
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.collective.group import Broken
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.lanes import combine
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, NodeResult
from trireme_shared.protocol.wire.messages import PushHeader
from trireme_shared.serving.core.blocks import Accumulator


def told(trainer: str, *nodes: tuple[int, int, int], loss: float = 0.0) -> Told:
    """`nodes`: first lane, last lane, count."""
    lanes = sorted({lane for first, last, _ in nodes for lane in range(first, last)})
    positions = tuple(LanePosition(lane=lane) for lane in lanes)
    header = PushHeader(
        job="j", term=1, generation=1, mode=Mode.SYNC, trainer=trainer, step=3, positions=positions
    )
    given = tuple(
        ToldNode(lanes=(first, last), count=count, header=0, result=NodeResult(loss_sum=loss))
        for first, last, count in nodes
    )
    return Told(step=3, headers=(header,), nodes=given)


def test_the_largest_nodes_that_have_each_lane_once_are_taken_of_the_lowest_rank():
    """Trainer a kept the node of four lanes of a generation before, of which two belong to b now."""
    found = chosen(
        [told("a", (0, 4, 8)), told("b", (2, 4, 4), (4, 6, 4)), told("c", (4, 6, 4), (6, 8, 0))], 8
    )
    assert [(node.lanes, node.rank, node.count) for node in found] == [
        ((0, 4), 0, 8),
        ((4, 6), 1, 4),
        ((6, 8), 2, 0),
    ]
    with pytest.raises(Broken, match="nobody gives lane 6 of step 3"):
        chosen([told("a", (0, 4, 8)), told("b", (4, 6, 4))], 8)


def test_what_is_told_comes_back_as_it_was_also_a_loss_that_is_no_number():
    mine = told("a", (0, 2, 4), loss=float("nan"))
    (found,) = read_told([mine.to_bytes()], 3)
    assert found.headers == mine.headers
    assert str(found.nodes) == str(mine.nodes)
    for bad in (b"", b"{}", b"[1]", mine.model_copy(update={"step": 4}).to_bytes()):
        with pytest.raises(Broken):
            read_told([bad], 3)


def test_lanes_are_covered_by_nodes_that_may_overlap():
    assert covers([(0, 4), (2, 4)], (1, 4))
    assert not covers([(0, 2)], (1, 4))


@pytest.mark.parametrize("narrow", [None, "bfloat16"])
def test_the_mean_over_all_nodes_at_once_has_the_bits_of_the_accumulator(narrow):
    numbers = torch.Generator().manual_seed(1)
    cut = [((0, 2), 5), ((2, 3), 0), ((3, 4), 7), ((4, 8), 7)]
    values = {lanes: torch.randn(50, generator=numbers) for lanes, _ in cut}
    if narrow is not None:
        values = {lanes: value.bfloat16().float() for lanes, value in values.items()}
    for order in itertools.permutations(cut):
        tree = Accumulator(BufferPool(), 8, "float32", 50)
        for lanes, count in order:
            whole = tree.add(lanes, values[lanes].clone() if count else None, count, None, narrow)
        nodes = {lanes: (values[lanes].clone() if count else None, count) for lanes, count in cut}
        found, count = mean_over(nodes, (0, 8), combine, torch.bfloat16 if narrow else None)
        assert whole is not None
        assert count == whole.count == 19
        assert torch.equal(found, whole.value)


def test_trainers_that_exchange_differently_are_told_how():
    def statement(trainer: str, **manifest: str) -> NativeStatement:
        return NativeStatement(trainer=trainer, version=1, listener=None, network="n", manifest=manifest)

    check_alike([statement("a", layout="1"), statement("b", layout="1")])
    with pytest.raises(InvalidArgument, match="reduction is fast in a and canonical in b"):
        check_alike([statement("a", reduction="fast"), statement("b", reduction="canonical")])


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend_of("auto") == backend_of("gloo") == "gloo"
    with pytest.raises(InvalidArgument, match="backend is nccl, but this process has no GPU"):
        backend_of("nccl")
