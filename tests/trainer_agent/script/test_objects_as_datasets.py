"""dataset() may return the object itself: it is described by the name of the hook, and never travels."""

from __future__ import annotations

import pytest
import torch

from master_service.storage.job_storage import count_records, runs_code
from tests.trainer_agent.scripts import write_script
from trainer_agent.data import open_dataset
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import DatasetError, InvalidArgument
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle

CLASSES = """
    class Map(torch.utils.data.Dataset):
        def __len__(self): return 5
        def __getitem__(self, i): return torch.tensor([i]), i

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self): return iter([1, 2, 3])

    class Sized(Stream):
        def __len__(self): return 3

    class Sharded(Stream):
        num_shards = 2
        def shard(self, num_shards, index): return Sharded()
"""


def script(folder, name, returned):
    return write_script(folder, name, classes=CLASSES, dataset=f"def dataset():\n    return {returned}")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("Map()", MapStyle("objects_map:dataset", records=5)),
        ("[{'x': 1}]", MapStyle("objects_map:dataset", records=1)),
        ("Sized()", IterableStyle("objects_map:dataset", records=3)),
        ("Stream()", IterableStyle("objects_map:dataset")),
        ("Sharded()", IterableStyle("objects_map:dataset", shards=2)),
        ("(n for n in range(3))", IterableStyle("objects_map:dataset")),
        (
            "torch.utils.data.DataLoader(Sharded(), 4)",
            IterableStyle("objects_map:dataset", shards=2, loader=True),
        ),
    ],
)
def test_an_object_with_a_length_is_described_by_its_hook(tmp_path, returned, expected):
    assert load(script(tmp_path, "objects_map", returned)).dataset() == expected
    table = count_records(expected, 2)
    shards = getattr(expected, "shards", 1)
    assert table.records == (expected.records or 3 * shards)
    assert table.files[0].path == f"objects_map:dataset{' shard 1 of 2' if shards > 1 else ''}"


def test_what_is_iterated_is_told_with_what_it_costs(tmp_path):
    told = []
    for name, returned in (("stream", "Stream()"), ("sharded", "Sharded()")):
        user = load(script(tmp_path, f"objects_{name}", returned))
        user.dataset()
        told += user.taken_over({})
    assert "objects_stream:dataset is iterated as one shard: its records are counted by" in told[0]
    assert "Give it num_shards and shard(num_shards, index), or a __getitem__" in told[0]
    assert "objects_sharded:dataset has 2 shards: its records are counted by" in told[1]


def test_what_cannot_be_found_again_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(InvalidArgument, match="which trainers find by the module's name") as caught:
        load(script(tmp_path, "objects-dash", "Map()")).dataset()
    assert "rename the file" in str(caught.value.hint)
    with pytest.raises(InvalidArgument, match="returned dict, not a dataset") as caught:
        load(script(tmp_path, "objects_dict", "{'train': Map(), 'test': Map()}")).dataset()
    assert caught.value.hint == "it has several, train, test: return one of them, for example found['train']"


@pytest.fixture
def module(tmp_path, monkeypatch):
    text = (
        "class Items:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        if i == 2: raise OSError('disk on fire')\n"
        "        if i > 3: raise IndexError(i)\n"
        "        return (i, -i, 2 * i) if i == 3 else (i, -i)\n"
        "begun = []\n"
        "def numbers():\n"
        "    begun.append(1)\n"
        "    return (n for n in range(10))\n"
        "nothing = 3\n"
        "named = [{'x': 1, 'y': 2}]\n"
    )
    (tmp_path / "items_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("items_module", None)


@pytest.mark.usefixtures("module")
def test_items_are_records_and_errors_name_the_item():
    reader = open_dataset(MapStyle("items_module:Items"))
    assert list(reader.read("items_module:Items", 0, 2).minibatch([1, 0])) == [
        {"x": 1, "y": -1},
        {"x": 0, "y": 0},
    ]
    assert list(
        open_dataset(MapStyle("items_module:Items", columns=("a", "b"))).read("", 1, 1).minibatch([0])
    ) == [{"a": 1, "b": -1}]
    with pytest.raises(
        DatasetError, match="item 2 of items_module:Items cannot be read: OSError: disk on fire"
    ):
        reader.read("items_module:Items", 2, 1)
    with pytest.raises(DatasetError, match="has 3 values, but there are 2 names: x, y"):
        reader.read("items_module:Items", 3, 1)
    with pytest.raises(
        DatasetError, match=r"is a dict with the columns x, y, and columns=\(a, b\) name the values"
    ):
        open_dataset(MapStyle("items_module:named", columns=("a", "b"))).read("items_module:named", 0, 1)
    with pytest.raises(DatasetError, match="ends at record 5, but records 5 to 6 were counted"):
        reader.read("items_module:Items", 5, 2)
    assert count_records(MapStyle("items_module:Items"), 3).records == 4
    assert count_records(IterableStyle("items_module:numbers"), 3).records == 10
    with pytest.raises(DatasetError, match="is int, which has no __getitem__"):
        count_records(MapStyle("items_module:nothing"), 3)


@pytest.mark.usefixtures("module")
def test_an_iterable_goes_on_where_it_is_and_begins_anew_for_what_lies_behind():
    import items_module

    reader = open_dataset(IterableStyle("items_module:numbers", records=10))
    xs = [list(reader.read("items_module:numbers", first, 2).minibatch([0, 1])) for first in (2, 4, 8, 0)]
    assert xs == [[{"x": n}, {"x": n + 1}] for n in (2, 4, 8, 0)]
    assert len(items_module.begun) == 3, "once to see that it can be made"
    with pytest.raises(DatasetError, match="ends at record 10, but records 9 to 10 were counted"):
        reader.read("", 9, 2)


def test_objects_of_a_loop_of_ones_own_are_described_by_where_they_were_given(tmp_path):
    path = tmp_path / "own_loop_objects.py"
    path.write_text(
        "import torch, trireme\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer, batches = trireme.prepare(model, optimizer, [{'x': 1.0}])\n"
        "for batch in batches:\n"
        "    trireme.backward(model(batch['x'][:, None]).mean())\n"
        "    optimizer.step()\n"
    )
    user = load(path)
    described = user.dataset()
    assert described == MapStyle("own_loop_objects:dataset", records=1)
    assert list(open_dataset(described).read("", 0, 1).minibatch([0])) == [{"x": 1.0}]
    user.loop.close()


OWN_LOOP = """
import torch, trireme

class Stream(torch.utils.data.IterableDataset):
    num_shards = 2

    def __init__(self, lengths=(3, 5)):
        self.lengths = lengths

    def shard(self, num_shards, index):
        return Stream(self.lengths[index:index + 1])

    def __iter__(self):
        return ({{"x": float(n)}} for length in self.lengths for n in range(length))

def main():
    net = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, batches = trireme.prepare(net, sgd, {dataset}, global_batch_size=2)
    for batch in batches:
        trireme.backward(model(batch["x"][:, None]).mean())
        optimizer.step()
main()
"""


@pytest.mark.parametrize(
    ("dataset", "loader"), [("Stream()", False), ("torch.utils.data.DataLoader(Stream(), 2)", True)]
)
def test_what_is_made_inside_of_prepare_and_iterated_is_counted_there(tmp_path, dataset, loader):
    """The master cannot: it would have to run the loop."""
    name = f"own_loop_stream_{loader}"
    (tmp_path / f"{name}.py").write_text(OWN_LOOP.format(dataset=dataset))
    user = load(tmp_path / f"{name}.py")
    described = user.dataset()
    assert described == IterableStyle(f"{name}:dataset", shards=2, shard_records=(3, 5), loader=loader)
    assert not runs_code(described)
    table = count_records(described, 2)
    assert [file.records for file in table.files] == [3, 5]
    place = table.locate(table.tasks - 1)
    read = open_dataset(described).read(place.file, place.first, place.count, place.offset)
    assert list(read.minibatch([0])) == [{"x": 4.0}]
    user.loop.close()


def test_an_iterator_made_inside_of_prepare_is_refused_because_it_ends_once(tmp_path):
    path = tmp_path / "own_loop_iterator.py"
    path.write_text(OWN_LOOP.format(dataset="iter(Stream())"))
    user = load(path)
    with pytest.raises(
        InvalidArgument, match="as dataset generator, which can be iterated once only"
    ) as caught:
        user.dataset()
    assert "def data(): return" in str(caught.value.hint)
    user.loop.close()


SPLIT = """
    import random, numpy as np
    full = list(range(60))
    made = []
    def parts():
        made.append(1)
        shift = np.random.randint(1000) + random.randint(0, 1000)
        return torch.utils.data.random_split([n + shift for n in full], [40, 20])
    def dataset(): return parts()[0]
    def evaluation_dataset(): return parts()[1]
"""


def split(folder, name, seed):
    """What the two functions give in a process of its own, through the readers and as the script's
    description sees it; and how often they were called."""
    user = load(write_script(folder, name, dataset=SPLIT))
    import sys

    found = []
    for hook in ("dataset", "evaluation_dataset"):
        described = user.dataset(hook, seed)
        assert user.dataset(hook, seed) == described
        reader = open_dataset(described, seed)
        records = reader.read("", 0, described.records).minibatch(range(described.records))
        assert list(open_dataset(described, seed).read("", 0, 5).minibatch(range(5))) == list(records)[:5]
        found.append([record["x"] for record in records])
    return found, len(sys.modules.pop(name).made)


def test_a_random_split_gives_the_same_parts_in_every_process_and_both_calls(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    parts, calls = split(tmp_path, "random_split_one", 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert split(tmp_path, "random_split_one", 3) == (parts, calls), "another process of the job"
    assert calls == 2, "each object is made once"
    trained, held_out = parts
    low = min(trained + held_out)
    assert sorted(n - low for n in trained + held_out) == list(range(60)), (
        "each record is trained or evaluated"
    )
    assert split(tmp_path, "random_split_one", 4)[0] != parts


def test_another_seed_in_one_process_makes_the_object_anew(tmp_path):
    user, found = load(write_script(tmp_path, "random_split_two", dataset=SPLIT)), []
    for seed in (3, 4, 3):
        described = user.dataset("dataset", seed)
        found.append(list(open_dataset(described, seed).read("", 0, 5).minibatch(range(5))))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("kind", "name", "records"), [(MapStyle, "Map", 5), (IterableStyle, "Sized", 3)])
def test_an_object_whose_length_is_another_one_in_this_process_is_refused_with_both(
    tmp_path, kind, name, records
):
    module = f"objects_shrunk_{name}".lower()
    load(script(tmp_path, module, f"{name}()"))
    for counted in (records - 1, records + 1):
        why = f"has {records} records at this trainer, and {counted} were counted"
        with pytest.raises(InvalidArgument, match=why):
            open_dataset(kind(f"{module}:dataset", records=counted)).read("", 0, 2)
    assert len(open_dataset(kind(f"{module}:{name}", records=records - 1)).read("", 0, 2)) == 2, (
        "the user says how many to use"
    )
