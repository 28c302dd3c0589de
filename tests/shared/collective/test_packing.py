"""Users' values as flat buffers and back; what is reduced over the tree has the bits of the tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.shared.collective.groups import Groups
from trireme_shared.collective.operations import (
    AllReduce,
    Broadcast,
    Moment,
    difference,
    put_together,
    take_apart,
    tree,
)
from trireme_shared.collective.records import Done
from trireme_shared.collective.session import Buffers
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.lanes import combine

MOMENT = Moment(lambda: 10.0, lambda: None)
DONE = Done(number=1, epoch=1)


def reduced(values, op="MEAN", weights=None, reduction="native", transport=None) -> list:
    """Of one value from each member; what each gets."""
    weights = weights or [1.0] * len(values)
    operations = [
        AllReduce(value, op, weight, reduction=reduction, transport=transport, buffers=Buffers())
        for value, weight in zip(values, weights, strict=True)
    ]
    if len(values) == 1:
        return [operations[0].read(operations[0].run(None, DONE, weights, 0, MOMENT))]
    groups = Groups(len(values))
    try:

        def work(rank: int):
            return operations[rank].read(operations[rank].run(groups.groups[rank], DONE, weights, 0, MOMENT))

        return groups.each(work)
    finally:
        groups.drop()


def test_values_keep_their_form_and_the_order_of_their_keys_does_not_matter():
    value = {"b": [np.ones((2, 2)), 2.5], "a": (torch.zeros(0), np.float32(3)), 3: torch.tensor(1.0)}
    skeleton, leaves = take_apart(value, plain=False)
    assert skeleton == take_apart(dict(reversed(value.items())), plain=False)[0]
    back = put_together(skeleton, [leaf.path for leaf in leaves])
    assert back == {"b": ["['b'][0]", "['b'][1]"], "a": ("['a'][0]", "['a'][1]"), 3: "[3]"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([torch.ones(2), None], "[1] is None"),
        ({"x": "text"}, "['x'] is str"),
        (torch.ones(2, dtype=torch.int64), "int64, which has no mean"),
        (torch.ones(2, dtype=torch.bool), "bool, which is not reduced"),
        (
            {"w": torch.ones(2).to(torch.float8_e5m2)},
            "['w'] is float8_e5m2, which is not reduced; cast it, to float32",
        ),
        (torch.ones(2, dtype=torch.int16), "int16, which is not reduced; cast it, to float32"),
        (torch.eye(2).to_sparse(), "is a sparse tensor"),
        ([1.0, torch.ones(2, device="meta")], "[1] is on the meta device and has no values"),
        ({"n": 2**63}, "['n'] is 9223372036854775808, which does not fit 64 bits"),
        (-(2**63) - 1, "the value is -9223372036854775809, which does not fit 64 bits"),
        (2**300, "the value is of 301 bits, which does not fit 64 bits"),
        (np.array(["a"]), "cannot be sent"),
        ({(1, 2): 1.0}, "the key (1, 2)"),
    ],
)
def test_what_cannot_be_reduced_is_told_with_its_place(value, told):
    with pytest.raises(InvalidArgument) as error:
        AllReduce(value, "MEAN", 1.0, reduction="native", transport=None, buffers=Buffers())
    assert told in str(error.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_values_is_not_broadcast():
    with pytest.raises(InvalidArgument, match=r"\['w'\] is on the meta device"):
        Broadcast({"w": torch.ones(2, device="meta")}, 0)
    quantized = torch.quantize_per_tensor(torch.zeros(2), scale=0.1, zero_point=0, dtype=torch.qint8)
    with pytest.raises(InvalidArgument, match="is a quantized tensor"):
        Broadcast(quantized, 0)


@pytest.mark.parametrize("reduction", ["native", "canonical"])
def test_the_weighted_mean_of_every_dtype_and_form(reduction):
    values = [
        {"f64": torch.full((3,), 1.0 + rank, dtype=torch.float64),
         "f16": torch.full((2, 2), 2.0 * rank, dtype=torch.float16),
         "bf16": torch.full((5,), 1.0 * rank, dtype=torch.bfloat16),
         "array": np.full((2, 3), rank, np.float32), "n": rank}
        for rank in range(3)
    ]  # fmt: skip
    for found in reduced(values, weights=[1.0, 0.0, 3.0], reduction=reduction):
        assert found["f64"].tolist() == [2.5] * 3
        assert found["f16"].tolist() == [[3.0] * 2] * 2
        assert found["f16"].dtype is torch.float16
        assert found["bf16"].tolist() == [1.5] * 5
        assert found["array"].tolist() == [[1.5] * 3] * 2
        assert isinstance(found["array"], np.ndarray)
        assert found["n"] == pytest.approx(1.5)


@pytest.mark.parametrize("reduction", ["native", "canonical"])
def test_weight_0_leaves_out_even_values_that_are_no_numbers(reduction):
    found = reduced(
        [torch.tensor([1.25, 3.0]), torch.tensor([math.nan, math.inf])],
        weights=[7.0, 0.0],
        reduction=reduction,
    )
    assert [each.tolist() for each in found] == [[1.25, 3.0]] * 2
    nobody = reduced([torch.ones(2), torch.ones(2)], weights=[0.0, 0.0], reduction=reduction)
    assert [each.tolist() for each in nobody] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("reduction", ["native", "canonical"])
def test_sums_of_integers_and_numbers(reduction):
    found = reduced([[torch.tensor([1, 2**40]), 3, 1.5]] * 2, op="SUM", reduction=reduction)
    assert [(each[0].tolist(), each[1], each[2]) for each in found] == [([2, 2**41], 6, 3.0)] * 2


ODD = ["int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]
REDUCED_INTEGERS = ["uint8", "int8", "int32", "int64"]


@pytest.mark.parametrize("reduction", ["native", "canonical"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_sum_of_what_gloo_cannot_carry_is_refused_at_once(reduction, count):
    for name in ODD:
        value = {"w": torch.ones(3).to(getattr(torch, name))}
        with pytest.raises(
            InvalidArgument, match=rf"\['w'\] is {name}, which is not reduced; cast it, to (int|float)"
        ):
            reduced([value] * count, op="SUM", reduction=reduction)


@pytest.mark.parametrize("reduction", ["native", "canonical"])
def test_all_other_integers_are_summed(reduction):
    value = {name: torch.ones(3, dtype=getattr(torch, name)) for name in REDUCED_INTEGERS}
    for found in reduced([value] * 2, op="SUM", reduction=reduction):
        assert {name: (each.tolist(), each.dtype) for name, each in found.items()} == {
            name: ([2, 2, 2], getattr(torch, name)) for name in REDUCED_INTEGERS
        }


def test_on_their_way_values_are_as_narrow_as_wanted():
    values = [torch.tensor([1.0 + 2**-10, 2.0]), torch.tensor([1.0 + 2**-10, 4.0])]
    assert reduced(values, transport=torch.bfloat16)[0].tolist() == [1.0, 3.0]
    assert reduced(values, transport=torch.bfloat16, reduction="canonical")[1].tolist() == [1.0, 3.0]
    assert reduced([torch.ones(3)], transport=torch.bfloat16)[0].dtype is torch.float32


def test_canonical_means_have_the_bits_of_the_tree_over_members_in_any_cut_of_buffers():
    generator = torch.Generator().manual_seed(4)
    values = [
        [torch.randn(13, generator=generator), torch.randn(2, 5, generator=generator)] for _ in range(3)
    ]
    counts = [3.0, 1.0, 2.0]
    left, count = combine(values[0][0].clone(), 3, values[1][0].clone(), 1)
    wanted, _ = combine(left, count, values[2][0].clone(), 2)
    for found in reduced(values, weights=counts, reduction="canonical"):
        assert torch.equal(found[0], wanted)
    assert torch.equal(tree([value[0].clone() for value in values], counts), wanted)


def test_what_the_root_gives_everybody_gets_whatever_they_had():
    state = {"model": {"w": torch.ones(2, 3), "flag": torch.tensor([True, False])},
             "state": {0: {"step": torch.tensor(3)}},
             "groups": [{"lr": 0.1, "name": None, "betas": (0.9, 0.99)}], "array": np.arange(3),
             "odd": {name: torch.arange(3.0).to(getattr(torch, name)) for name in [*ODD, "complex64"]}}  # fmt: skip
    groups = Groups(2)
    try:

        def work(rank: int):
            operation = Broadcast(state if rank == 1 else {"nothing": 0}, None)
            return operation.read(operation.run(groups.groups[rank], DONE, [0.0, 0.0], 1, MOMENT))

        for found in groups.each(work):
            assert torch.equal(found["model"]["w"], torch.ones(2, 3))
            assert found["model"]["flag"].tolist() == [True, False]
            assert found["state"][0]["step"].item() == 3
            assert found["groups"] == state["groups"]
            assert found["array"].tolist() == [0, 1, 2]
            for name, odd in found["odd"].items():
                assert odd.dtype is getattr(torch, name)
                assert odd.to(torch.complex64).tolist() == [0, 1, 2]
    finally:
        groups.drop()


def test_a_difference_is_named_by_rank_and_tensor():
    manifests = [
        ["allreduce MEAN of 1 tensors", "['w']: float32 [10]"],
        ["allreduce MEAN of 1 tensors", "['w']: float32 [11]"],
    ]
    assert difference(manifests) == "rank 0 has ['w']: float32 [10], and rank 1 has ['w']: float32 [11]"


@pytest.mark.parametrize("reduction", ["native", "canonical"])
@pytest.mark.parametrize(("dtype", "transport"), [(torch.float16, None), (torch.float32, torch.float16)])
def test_a_mean_of_large_numbers_in_float16_is_finite(reduction, dtype, transport):
    values = [torch.full((3,), 40000.0, dtype=dtype) for _ in range(3)]
    for found in reduced(values, weights=[1.0, 0.0, 1.0], reduction=reduction, transport=transport):
        assert found.tolist() == [40000.0] * 3
