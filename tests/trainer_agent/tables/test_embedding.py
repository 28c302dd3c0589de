"""Layers give what torch's give, and their rows the gradients that torch's sparse ones have, to the bit."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trireme
from trainer_agent.tables import recording
from trainer_agent.tables.embedding import ModelTables, named_ids
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.tables.grouping import grouped

IDS = [0, -1, 7, 2**63 - 1, -(2**63), 3, 4, 5, 6, 8]  # by their places in a weight of torch's
ORDER = sorted(IDS)
DIM = 3


class Weights:
    """A RowSource: id ORDER[i] has row i."""

    def __init__(self, seed: int = 0) -> None:
        self.values = np.random.default_rng(seed).standard_normal((len(ORDER), DIM)).astype(np.float32)
        self.asked: list[list[int]] = []

    def lookup(self, table: int, ids: np.ndarray) -> np.ndarray:
        self.asked.append(ids.tolist())
        return self.values[[ORDER.index(key) for key in ids.tolist()]]


def real(places: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(ORDER)[places].to(dtype)


def gradients_of(weight: torch.Tensor) -> tuple[list[int], np.ndarray]:
    if weight.grad is None:
        return [], np.empty((0, DIM), np.float32)
    grad = weight.grad.coalesce()
    return [ORDER[place] for place in grad.indices()[0].tolist()], grad.values().numpy()


def same_gradients(recording: Any, weight: torch.Tensor) -> bool:
    (rows,) = recording.lane_rows(4)
    ids, values = gradients_of(weight)
    assert (rows.ids.tolist(), rows.count) == (ids, 4)
    return np.array_equal(rows.gradients.view(np.int32), values.view(np.int32))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_outputs_and_gradients_have_the_bits_of_torchs(data: Any) -> None:
    seed, padded = data.draw(st.integers(0, 2**31)), data.draw(st.booleans())
    padding = ORDER.index(7) if padded else None
    ours, source = trireme.nn.Embedding("t", DIM, padding_idx=7 if padded else None), Weights(seed)
    theirs = nn.Embedding(len(ORDER), DIM, padding, sparse=True)
    theirs.weight.data = torch.from_numpy(source.values.copy())
    if padding is not None:
        theirs.weight.data[padding] = 0
    tables, generator = ModelTables(ours, 1), torch.Generator().manual_seed(seed)
    shapes = data.draw(
        st.lists(st.sampled_from([(), (0,), (5,), (2, 30), (4, 1, 3)]), min_size=1, max_size=3)
    )
    with tables.recording(source) as recording:
        places = [torch.randint(0, len(ORDER), shape, generator=generator) for shape in shapes]
        mine = torch.cat([ours(real(each)).view(-1, DIM) for each in places])
        other = theirs(torch.cat([each.view(-1) for each in places]))
        assert torch.equal(mine, other)
        weights = torch.randn(mine.shape, generator=generator)
        for outputs in (mine, other):
            (outputs * weights).sum().backward()
    assert same_gradients(recording, theirs.weight)
    assert all(asked == sorted(set(asked)) for asked in source.asked)
    assert not (padded and any(7 in asked for asked in source.asked))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bags_have_the_bits_of_torchs(data: Any) -> None:
    seed, padded = data.draw(st.integers(0, 2**31)), data.draw(st.booleans())
    mode, generator = data.draw(st.sampled_from(["mean", "sum"])), torch.Generator().manual_seed(seed)
    ours, source = trireme.nn.EmbeddingBag("t", DIM, mode, padding_idx=7 if padded else None), Weights(seed)
    theirs = nn.EmbeddingBag(
        len(ORDER), DIM, mode=mode, sparse=True, padding_idx=ORDER.index(7) if padded else None
    )
    theirs.weight.data = torch.from_numpy(source.values.copy())
    arguments: dict[str, Any] = {}
    if data.draw(st.booleans()):
        sizes = torch.tensor(data.draw(st.lists(st.integers(0, 4), max_size=6)), dtype=torch.int64)
        places = torch.randint(0, len(ORDER), (int(sizes.sum()),), generator=generator)
        arguments["offsets"] = sizes.cumsum(0) - sizes
    else:
        places = torch.randint(
            0, len(ORDER), data.draw(st.sampled_from([(4, 5), (3, 1)])), generator=generator
        )
    if mode == "sum" and data.draw(st.booleans()):
        arguments["per_sample_weights"] = torch.randn(places.shape, generator=generator)
    with ModelTables(ours, 1).recording(source) as recording:
        mine, other = ours(real(places), **arguments), theirs(places, **arguments)
        assert torch.equal(mine, other)
        weights = torch.randn(mine.shape, generator=generator)
        (mine * weights).sum().backward()
        (other * weights).sum().backward()
    assert same_gradients(recording, theirs.weight)


def test_bags_without_ids_are_zeros() -> None:
    ours = trireme.nn.EmbeddingBag("t", DIM)
    with ModelTables(ours, 1).recording(Weights()):
        assert ours(torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 2
        assert ours(torch.empty(0, 4, dtype=torch.int64)).shape == (0, DIM)


def test_weights_of_samples_get_their_gradients() -> None:
    ours, source = trireme.nn.EmbeddingBag("t", DIM, "sum"), Weights()
    weights, places = torch.tensor([[0.5, 2.0]], requires_grad=True), torch.tensor([[1, 1]])
    with ModelTables(ours, 1).recording(source):
        ours(real(places), per_sample_weights=weights).sum().backward()
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad[0], [source.values[1].sum()] * 2, rtol=1e-6)


def test_int32_is_an_id_too_and_rows_that_the_loss_does_not_use_get_no_gradient() -> None:
    layer, source = trireme.nn.Embedding("t", DIM), Weights()
    with ModelTables(layer, 1).recording(source) as recording:
        assert torch.equal(
            layer(torch.tensor([3, 4], dtype=torch.int32)),
            torch.from_numpy(source.lookup(0, np.array([3, 4]))),
        )
        layer(torch.tensor([5, 3])).sum().backward()
        with torch.no_grad():
            assert not layer(torch.tensor([6])).requires_grad
    assert recording.lane_rows(1)[0].ids.tolist() == [3, 5]


def test_unsigned_ids_of_64_bits_keep_their_bits() -> None:
    tables = ModelTables(model := trireme.nn.Embedding("t", DIM, padding_idx=2**64 - 1), 0)
    tables.bind(Weights())
    unsigned = torch.from_numpy(np.array([2**63, 2**64 - 1, 7], dtype=np.uint64))
    found = model(unsigned).detach()
    assert torch.equal(found, model(torch.tensor([-(2**63), -1, 7])).detach())
    assert torch.equal(found[1], torch.zeros(DIM))


def test_outside_of_a_minibatch_rows_are_constants_or_nowhere() -> None:
    layer, source = trireme.nn.Embedding("t", DIM), Weights()
    tables = ModelTables(layer, 1)
    with pytest.raises(InvalidArgument, match=r"table t has no rows here.*load_tables"):
        layer(torch.tensor([3]))
    with tables.reading(source):
        assert not layer(torch.tensor([3])).requires_grad
        with tables.recording(source):
            assert layer(torch.tensor([3])).requires_grad
        assert not layer(torch.tensor([3])).requires_grad
        with pytest.raises(InvalidArgument, match="no rows here"):
            copy.deepcopy(layer)(torch.tensor([3]))
    with pytest.raises(InvalidArgument, match="no rows here"):
        layer(torch.tensor([3]))


def test_a_gradient_of_rows_is_permitted_as_those_of_parameters_are() -> None:
    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("not now")

    layer = trireme.nn.Embedding("t", DIM)
    with ModelTables(layer, 1).recording(Weights(), refuse), pytest.raises(RuntimeError, match="not now"):
        layer(torch.tensor([3])).sum().backward()


BAG_2, BAG_1 = torch.tensor([[3, 4]]), torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("Embedding", ([3],), r"got list; give a tensor of integers"),
        (
            "Embedding",
            (torch.tensor([3.0]),),
            r"got a tensor of torch.float32; ids are int64, int32, uint64 or uint32",
        ),
        ("Embedding", (torch.tensor([True]),), r"got a tensor of torch.bool"),
        ("EmbeddingBag", (BAG_1,), r"ids of shape \(2,\) without offsets; bags are \(bags, ids\)"),
        ("EmbeddingBag", (BAG_2, torch.tensor([0])), r"ids of shape \(1, 2\) with offsets"),
        ("EmbeddingBag", (BAG_2.unsqueeze(0),), r"ids of shape \(1, 1, 2\) without"),
        ("EmbeddingBag", (BAG_1, torch.tensor([1])), "offsets begin with 1; the first bag begins at 0"),
        ("EmbeddingBag", (BAG_1, torch.tensor([0, 2, 1])), "offsets fall from 2 to 1 at place 2"),
        ("EmbeddingBag", (BAG_1, torch.tensor([0, 3])), "the last bag begins at 3, and there are 2 ids"),
        ("EmbeddingBag", (BAG_1, torch.tensor([0.0])), "offsets: got a tensor of torch.float32"),
        ("EmbeddingBag", (BAG_1, torch.tensor([[0]])), r"offsets have the shape \(1, 1\)"),
        ("EmbeddingBag", (BAG_1, torch.empty(0, dtype=torch.int64)), "got 2 ids and no bag"),
        (
            "EmbeddingBag",
            (BAG_2, None, torch.ones(1, 2)),
            "per_sample_weights need mode \"sum\", the layer has 'mean'",
        ),
    ],
)
def test_what_is_no_input_is_told(kind: str, arguments: tuple[Any, ...], message: str) -> None:
    layer = getattr(trireme.nn, kind)("t", DIM)
    with (
        ModelTables(layer, 1).recording(Weights()),
        pytest.raises(InvalidArgument, match=f"^table t: {message}|^table t.*{message}"),
    ):
        layer(*arguments)
    with pytest.raises(InvalidArgument, match=r"float32 of the ids' shape \(1, 2\)"):
        trireme.nn.EmbeddingBag("t", DIM, "sum")(BAG_2, None, torch.ones(1, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a b"}, "table 'a b': name is 'a b'.*letters, digits"),
        ({"dim": 0}, "dim is 0: Input should be greater than or equal to 1"),
        ({"dim": "8"}, "dim is '8'"),
        ({"optimizer": torch.optim.Adagrad}, "has the optimizer Adagrad; rows are stepped by trireme.nn.SGD"),
        ({"init": "xavier"}, "init is 'xavier'; write"),
        ({"init": "normal(1e999)"}, r"init is 'normal\(1e999\)'"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"admit_after": 300}, "admit_after is 300"),
        ({"evict_after_steps": 0}, "evict_after_steps is 0"),
        ({"padding_idx": 2**64}, "padding_idx is 18446744073709551616"),
    ],
)
def test_settings_that_cannot_be_are_told_when_the_layer_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        trireme.nn.Embedding(**({"name": "t", "dim": 2} | arguments))
    with pytest.raises(InvalidArgument, match="lr is -1: Input should be greater"):
        trireme.nn.Adam(lr=-1)
    with pytest.raises(InvalidArgument, match="mode is 'max'"):
        trireme.nn.EmbeddingBag("t", 2, "max")


def test_tables_are_in_the_order_of_their_names_and_layers_share_them() -> None:
    shared = trireme.nn.Embedding("b", 2, init="zeros")
    bag = trireme.nn.EmbeddingBag("b", 2, init="constant(0)")
    model = nn.ModuleDict(
        {"x": nn.Sequential(shared, nn.Sequential(shared)), "y": bag, "a": trireme.nn.Embedding("a", 3)}
    )
    specs = ModelTables(model, 5).specs
    assert [(spec.name, spec.dim) for spec in specs] == [("a", 3), ("b", 2)]
    assert specs[0].seed != specs[1].seed
    assert specs == ModelTables(model, 5).specs != ModelTables(model, 6).specs
    assert (list(model.parameters()), model.state_dict()) == ([], {})
    model["z"] = trireme.nn.Embedding("b", 4, init="zeros")
    with pytest.raises(
        InvalidArgument, match="two layers use the table b with different settings: dim 2 and 4"
    ):
        ModelTables(model, 5)


def test_a_minibatch_with_more_ids_than_max_rows_is_told() -> None:
    layer = trireme.nn.Embedding("t", DIM, max_rows=1)
    with ModelTables(layer, 1).recording(Weights()) as recording:
        layer(torch.tensor([3, 4])).sum().backward()
    with pytest.raises(InvalidArgument, match="a minibatch has 2 ids of table t, whose max_rows is 1"):
        recording.lane_rows(2)


def test_ids_of_texts_are_those_that_are_documented() -> None:
    assert trireme.nn.ids_of(["", "user-7", "ä"]).tolist() == [
        0x2D06800538D394C2,
        -5629928110512208578,
        6066459093398238388,
    ]
    assert trireme.nn.ids_of([]).dtype == torch.int64
    for wrong in ("text", [3]):
        with pytest.raises(InvalidArgument, match="ids_of takes"):
            trireme.nn.ids_of(wrong)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"users": torch.tensor([1])}, "names the table 'users', and the model's tables are tag, user"),
        (
            {"user": torch.tensor([1.0])},
            "ids(batch) of table user: got a tensor of torch.float32; ids are int64, int32, uint64 or uint32",
        ),
        ({"user": [1, 2]}, "ids(batch) of table user: got list; give a tensor of integers"),
        (torch.tensor([1]), "ids(batch) returned Tensor; it returns a dict"),
    ],
)
def test_a_script_that_names_ids_in_another_way_is_told_how(found: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        named_ids(["tag", "user"], found)


def test_a_script_names_ids_of_any_shape_and_may_leave_tables_out() -> None:
    tag, user = named_ids(["tag", "user"], {"user": torch.tensor([[3, -1], [3, 7]], dtype=torch.int32)})
    assert (tag.ids.tolist(), user.ids.tolist()) == ([], [-1, 3, 7])


def test_ids_that_were_named_are_not_sorted_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, source, ids = trireme.nn.Embedding("t", DIM), Weights(), torch.tensor([[3, 8], [3, 7]])
    tables, named = ModelTables(layer, 1), named_ids(["t"], {"t": ids})
    sorted_ids: list[list[int]] = []
    monkeypatch.setattr(
        recording, "grouped", lambda given: sorted_ids.append(given.tolist()) or grouped(given)
    )
    with tables.recording(source, named=named) as found:
        layer(ids.clone()).sum().backward()
        assert sorted_ids == []
        layer(torch.tensor([4, 4])).sum().backward()
    assert sorted_ids == [[4, 4]]
    assert found.lane_rows(4)[0].ids.tolist() == [3, 4, 7, 8]
