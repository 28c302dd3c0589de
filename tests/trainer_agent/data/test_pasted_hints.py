"""What the messages about data show as code works when it is pasted."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader

import trireme
from tests.trainer_agent.scripts import write_script
from trainer_agent.data import loaders
from trainer_agent.data.loaders import take_over
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import InvalidArgument

ITEMS = [{"x": float(n)} for n in range(10)]
#: What a user has in his script.
HIS = {
    "torch": torch,
    "trireme": trireme,
    "itertools": itertools,
    "DataLoader": DataLoader,
    "dataset": ITEMS,
    "indices": [1, 2, 5],
    "order": [9, 0, 4],
    "weights": [1.0] * 10,
}
REFUSED = {
    "no batch size": DataLoader(ITEMS, batch_size=None),
    "sampled with replacement": DataLoader(ITEMS, 4, sampler=data.RandomSampler(ITEMS, replacement=True)),
    "fewer samples": DataLoader(ITEMS, 4, sampler=data.RandomSampler(ITEMS, num_samples=4)),
    "distributed": DataLoader(ITEMS, 4, sampler=data.DistributedSampler(ITEMS, num_replicas=2, rank=0)),
    "a subset": DataLoader(ITEMS, 4, sampler=data.SubsetRandomSampler([1, 2])),
    "an order": DataLoader(ITEMS, 4, sampler=[3, 1, 2]),
}


def shown(text):
    """The calls in a sentence, whole."""
    for begun in re.finditer(r"\b(DataLoader|itertools\.islice|trireme\.data\.\w+)\(", text):
        depth = 0
        for end in range(begun.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                yield text[begun.start() : end + 1]
                break


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_refused_data_loader_is_told_to_be_is_taken_with_its_batch_size(name):
    with pytest.raises(InvalidArgument) as caught:
        take_over(REFUSED[name], "train:dataset")
    found = list(shown(caught.value.hint))
    assert found
    for code in found:
        taken = take_over(eval(code, HIS), "train:dataset")
        assert taken.settings["global_batch_size"] == (REFUSED[name].batch_size or 32), code


def test_of_an_evaluation_too():
    with pytest.raises(InvalidArgument) as caught:
        take_over(DataLoader(ITEMS, 4, shuffle=True), "train:evaluation_dataset", evaluates=True)
    (code,) = shown(caught.value.hint)
    assert take_over(eval(code, HIS), "train:evaluation_dataset", evaluates=True).count == 10


def test_no_message_of_a_data_loader_that_shows_one_is_left_out():
    """Those above are all of them: the source has no other."""
    sources = re.findall(r"give DataLoader\(|weights DataLoader\(", inspect.getsource(loaders))
    assert len(sources) == 7


def test_what_is_shown_instead_of_several_datasets_or_none(tmp_path):
    several = "def dataset(): return {'train': [{'x': 1.0}], 'test': [{'x': 2.0}]}"
    with pytest.raises(InvalidArgument) as caught:
        load(write_script(tmp_path, "several", dataset=several)).dataset()
    code = re.findall(r"for example (.+)", caught.value.hint)[0]
    assert eval(code, {"found": {"train": ITEMS}}) is ITEMS
    with pytest.raises(InvalidArgument) as caught:
        load(write_script(tmp_path, "nothing", dataset="def dataset(): return 3")).dataset()
    (code,) = shown(caught.value.hint)
    assert eval(code, HIS).urls == ("train-*.parquet",)


def test_what_has_no_end_is_given_one(monkeypatch, capsys):
    from trireme_shared.datasets import iterables
    from trireme_shared.protocol.records.datasets import IterableStyle

    monkeypatch.setattr(iterables, "TELL_S", 0.0)
    monkeypatch.setattr(iterables, "load_object", lambda *_: itertools.count())
    records = iterables.Shards(IterableStyle("it:endless"), 0).records("it:endless")
    assert sum(1 for _ in itertools.islice(records, 600)) == 600
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("it:endless: 256 records are counted by iterating it, and it goes on")
    (code,) = shown(told[0])
    assert next(eval(code, HIS | {"records": itertools.count()})) == 0
