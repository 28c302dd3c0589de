"""Each model of the zoo trains as in plain PyTorch: to its bits with one lane, and with four lanes it learns,
to the same bits with both strategies, whoever computes and dies."""

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
from trainer_agent.model.devices import compile_each_shape_alone
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.records import JobSpec, JobState, Phase

WAYS = {"parameter_server": cluster, "collective": collective_cluster}
KILLED = [
    pytest.param(name, strategy, marks=[] if strategy in model.killed else pytest.mark.soak)
    for name, model in ZOO.items()
    for strategy in WAYS
]
CALM: dict[str, Trained] = {}


async def trained(spec: JobSpec) -> Trained:
    """By a job with one trainer in this process; kernels may be compiled, and the machine be busy."""
    return Trained(*await trained_in(WAYS[spec.strategy], spec, limit_s=100.0))


async def calm(folder: Path, name: str) -> Trained:
    """With four lanes, undisturbed. Trained once: whatever is done to a job, it has these bits."""
    if name not in CALM:
        spec = spec_of(write_script(folder, ZOO[name]), lanes=4)
        CALM[name] = await trained(spec)
    return CALM[name]


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
    spec = spec_of(script, epochs=2)
    plain = plainly(tmp_path, model, spec)
    alone = run(load(script), spec)
    state = dict(alone.model.state_dict())
    found = {"python script.py": differences(Trained(stripped(state), alone.metrics), plain)}
    for strategy in WAYS:
        of_job = spec_of(script, epochs=2, strategy=strategy, storage=str(tmp_path / strategy))
        found[strategy] = differences(await trained(of_job), plain)
    assert not any(found.values()), found


def stripped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


@pytest.mark.parametrize("name", ZOO)
async def test_with_four_lanes_it_is_finite_and_learns(tmp_path: Path, name: str):
    found = await calm(tmp_path, name)
    script = write_script(tmp_path, ZOO[name])
    assert has_fallen(script, spec_of(script), found.state) >= ZOO[name].falls


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "strategy"), KILLED)
async def test_killed_processes_change_no_bit(tmp_path: Path, name: str, strategy: str):
    assert differences(await killed(tmp_path, ZOO[name], strategy), await calm(tmp_path, name)) == []


async def killed(folder: Path, model: Model, strategy: str) -> Trained:
    """A trainer is killed, and then a parameter server or another trainer."""
    script = write_script(folder, model, SLOWABLE)
    script.with_name("slow").touch()
    servers = {"pservers": 2} if strategy == "parameter_server" else {}
    values = {"lanes": 4, "trainers": 2, "checkpoint_every_steps": 5, **servers}
    spec = spec_of(script, strategy=strategy, storage=str(folder / "run"), **values)
    second = "pserver-1" if servers else "trainer-1"
    async with cluster_of(spec, folder) as processes:
        await reach_step(processes, 3)
        processes.kill("trainer-0")
        await reach_step(processes, 8)
        processes.kill(second)
        found = outcome(await ended(processes))
        assert processes.deaths.keys() >= {"trainer-0", second}
    return found


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, in inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and none is here")
@pytest.mark.parametrize("strategy", WAYS)
async def test_compiled_kernels_change_no_bit_when_processes_are_killed(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()  # what this process has compiled before
    compile_each_shape_alone()  # as in jobs and by `python script.py`
    script = write_script(tmp_path, INDUCTOR)
    spec = spec_of(script, epochs=2, strategy=strategy)
    plain = plainly(tmp_path, INDUCTOR, spec)  # first: the jobs, with less time, find its kernels
    assert differences(await trained(spec), plain) == []
    quiet = await trained(spec_of(script, lanes=4, strategy=strategy, storage=str(tmp_path / "quiet")))
    assert differences(await killed(tmp_path, INDUCTOR, strategy), quiet) == []
