"""How many parameter servers and threads a job gets on this machine."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.end_to_end.local_cluster import cluster_of, spec_of
from tests.end_to_end.scripts import write_script
from trireme.cli.run import RunRequest, run_command
from trireme.config import Config, ConfigError
from trireme.launch.cluster import MemberNumbers, pservers_for, threads_for
from trireme.launch.processes import Child, spawn
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import TextLines

MIB = 1 << 20
LONGER_THAN_AN_ELECTION_S = 1.0


def model_of(mib, frozen_mib=0):
    return {
        "tensors": [
            ["param", "w", [mib * MIB // 4 // 64, 64], "torch.float32", 0],
            ["param", "frozen", [frozen_mib * MIB // 2], "torch.bfloat16", -1],
            ["buffer", "mean", [1 << 30], "torch.float32", -1],
        ],
        "optimizer": {},
    }


def test_half_of_the_cores_one_for_each_32_mib_and_at_least_one():
    found = {
        (mib, cores): pservers_for(model_of(mib, 500), cores)
        for mib in (1, 64, 100, 4000)
        for cores in (1, 2, 16)
    }
    assert found == {
        **{(mib, cores): 1 for mib in (1, 64, 100, 4000) for cores in (1, 2)},
        (1, 16): 1,
        (64, 16): 2,
        (100, 16): 3,
        (4000, 16): 8,
    }
    assert pservers_for(None, 64) == 1  # --no-check
    assert pservers_for(model_of(1 << 20), 1 << 20) == 128


def spec_with(pservers, trainers, threads=1):
    values = {"pservers": pservers, "trainers": trainers, "threads_per_trainer": threads}
    return JobSpec(job="j", script="/s.py", storage="/d", dataset=TextLines("t.txt"), **values)


def test_all_members_together_have_no_more_threads_than_cores():
    found = [
        threads_for(spec_with(*members), 16)
        for members in ((1, 1), (1, 2), (3, 2), (8, 2), (1, 2, 4), (1, 30))
    ]
    assert found == [8, 5, 3, 1, 1, 1]
    assert threads_for(spec_with(1, 2), 2) == 1


async def test_parameter_servers_are_started_with_the_threads_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_THREADS", "3")
    async with cluster_of(spec_of(tmp_path, trainers=1, pservers=1), tmp_path) as cluster:
        threads = {name: child.environment.get("TRIREME_THREADS") for name, child in cluster.children.items()}
    assert threads == {"master-0": None, "pserver-0": "3", "trainer-0": None}


async def test_who_left_comes_back_once_its_end_has_been_seen_to(tmp_path):
    """A resize to fewer and one to more right after it: who had just left was started twice, and the run
    ended by an AssertionError."""
    child = Child("trainer-0", ["true"], {}, tmp_path / "log", spawn)
    numbers = MemberNumbers(spec_with(1, 1), {child.name: child})

    async def leave(_: Child) -> None:
        pass

    numbers.end(child, leave)
    assert numbers.has_left(child)
    assert numbers.comes_back("trainer", {child.name}) is None
    assert numbers.comes_back("trainer", ()) is child
    assert not numbers.has_left(child)


async def test_a_slow_start_is_not_taken_for_a_resize(tmp_path, monkeypatch):
    """A master led before the last member was started, and what was still to be started was started twice."""
    start = Child.start

    async def start_slowly(child):
        if child.name.startswith("pserver-"):
            await asyncio.sleep(LONGER_THAN_AN_ELECTION_S)
        await start(child)

    monkeypatch.setattr(Child, "start", start_slowly)
    async with cluster_of(spec_of(tmp_path), tmp_path) as cluster:
        await cluster.master_url()
        await asyncio.sleep(0.3)
        assert list(cluster.children) == ["master-0", "pserver-0", "pserver-1", "trainer-0", "trainer-1"]


@pytest.mark.parametrize(("asked", "found"), [(None, 3), ("2", 2)])
def test_a_run_counts_the_parameters_of_the_model(tmp_path, monkeypatch, capsys, asked, found):
    monkeypatch.setattr("trireme.cli.run.cores", lambda: 16)
    monkeypatch.setattr("trireme.launch.cluster.BYTES_EACH", 12)
    model = "def model():\n    return nn.Linear(8, 1)\n"  # 36 bytes
    script = write_script(tmp_path, model=model)
    flags = {"data_dir": str(tmp_path / "runs"), "pservers": asked, "global_batch_size": 8}
    assert run_command(RunRequest(script, flags, dry_run=True)) == 0
    assert json.loads(capsys.readouterr().out)["pservers"] == found


def test_auto_stays_auto_in_the_scripts_config_and_other_words_are_refused():
    assert Config(pservers="auto").to_dict() == {"pservers": "auto"}
    with pytest.raises(ConfigError, match="pservers = 'many': "):
        Config(pservers="many")
