"""Each model of the zoo trains as in plain PyTorch: to its bits with one lane, and with four lanes to the
same bits whoever computes, dies or joins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.local_cluster import cluster_of, ended, reach_step
from tests.trainer_agent.cluster import cluster, trained_in
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.zoo.models import INDUCTOR, ZOO, Model
from tests.zoo.training import SLOWABLE, Trained, differences, has_fallen, plainly, spec_of, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.records import JobSpec, JobState, Phase

WAYS = {"parameter_server": cluster, "collective": collective_cluster}
KILLED = [
    pytest.param(name, strategy, marks=[] if strategy in model.killed else pytest.mark.soak)
    for name, model in ZOO.items()
    for strategy in WAYS
]
LEARNING = [
    pytest.param(name, marks=[] if name in ("MoCo", "VQ-VAE", "LoRA", "GAN") else pytest.mark.soak)
    for name in ZOO
]


async def trained(spec: JobSpec, trainers: int, *, death: bool = False) -> Trained:
    """By a job in this process."""
    return Trained(*await trained_in(WAYS[spec.strategy], spec, trainers, death_at=6 if death else None))


def outcome(state: JobState) -> Trained:
    assert state.phase is Phase.COMPLETED, state
    assert state.result is not None
    exported = torch.load(state.result.exports["state_dict"], weights_only=True)
    return Trained(exported, state.result.metrics)


@pytest.mark.parametrize("name", ZOO)
async def test_with_one_lane_it_has_the_bits_of_plain_pytorch(tmp_path: Path, name: str):
    """Both strategies, and `python script.py`."""
    model = ZOO[name]
    script = write_script(tmp_path, model)
    spec = spec_of(script, model, epochs=2)
    plain = plainly(tmp_path, model, spec)
    alone = run(load(script), spec)
    state = dict(alone.model.state_dict())
    found = {"python script.py": differences(Trained(stripped(state), alone.metrics), plain)}
    for strategy in WAYS:
        of_job = spec_of(script, model, epochs=2, strategy=strategy, storage=str(tmp_path / strategy))
        found[strategy] = differences(await trained(of_job, 1), plain)
    assert not any(found.values()), found


def stripped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


@pytest.mark.parametrize("name", LEARNING)
async def test_with_four_lanes_it_learns_whoever_computes_and_dies(tmp_path: Path, name: str):
    model = ZOO[name]
    script = write_script(tmp_path, model)
    found = []
    for strategy, trainers, death in (("parameter_server", 3, True), ("collective", 1, False)):
        storage = str(tmp_path / strategy)
        spec = spec_of(script, model, lanes=4, strategy=strategy, storage=storage)
        found.append(await trained(spec, trainers, death=death))
    assert differences(*found) == []
    assert has_fallen(script, spec, found[0].state) >= model.falls


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "strategy"), KILLED)
async def test_killed_processes_change_no_bit(tmp_path: Path, name: str, strategy: str):
    """A trainer, and then a parameter server or another trainer."""
    await check_killed(tmp_path, ZOO[name], strategy)


async def check_killed(folder: Path, model: Model, strategy: str) -> None:
    values = {"lanes": 4, "strategy": strategy, "checkpoint_every_steps": 10}
    (folder / "calm").mkdir()
    script = write_script(folder / "calm", model)
    quiet = await trained(spec_of(script, model, **values), 1)
    (folder / "killed").mkdir()
    script = write_script(folder / "killed", model, SLOWABLE)
    script.with_name("slow").touch()
    servers = {"pservers": 2} if strategy == "parameter_server" else {}
    spec = spec_of(script, model, **values, **servers, trainers=2, storage=str(folder / "run"))
    second = "pserver-1" if servers else "trainer-1"
    async with cluster_of(spec, folder) as processes:
        await reach_step(processes, 8)
        processes.kill("trainer-0")
        await reach_step(processes, 20)
        processes.kill(second)
        found = outcome(await ended(processes))
        assert processes.deaths.keys() >= {"trainer-0", second}
    assert differences(found, quiet) == []


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and none is here")
@pytest.mark.parametrize("strategy", WAYS)
async def test_compiled_kernels_change_no_bit_when_processes_are_killed(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (tmp_path / "plain").mkdir()
    script = write_script(tmp_path / "plain", INDUCTOR)
    spec = spec_of(script, INDUCTOR, epochs=2, strategy=strategy)
    plain = plainly(tmp_path / "plain", INDUCTOR, spec)
    assert differences(await trained(spec, 1), plain) == []
    await check_killed(tmp_path, INDUCTOR, strategy)
