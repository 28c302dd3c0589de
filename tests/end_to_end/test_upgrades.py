"""A cluster of real processes that is restarted with another version while it trains: the jobs of both
strategies have the bits of a job that nobody disturbed."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.end_to_end.command import Command
from tests.end_to_end.local_cluster import EPOCHS, same_bits, slowable_loss
from tests.end_to_end.scripts import EVALUATION, write_script
from tests.end_to_end.versions import (
    LIMIT_S,
    STEPS,
    Cluster,
    Trees,
    check,
    cluster,
    submit_both,
    trees,
)
from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.waiting import until
from trireme.cli import exit_codes

__all__ = ["cluster", "embedded_etcd", "trees"]

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1800)]

SLOW_S = 0.1
LANES = 4
RESTARTS = [
    ("older", "newer", "older"),
    ("newer", "older", "newer"),
    ("oldest", "newer"),
]


@pytest.mark.parametrize("versions", RESTARTS, ids="-".join)
async def test_a_cluster_is_restarted_with_another_version(
    cluster: Cluster, versions: tuple[str, ...], undisturbed: dict[str, torch.Tensor]
) -> None:
    for number, version in enumerate(versions):
        await cluster.master("master", version)
        await cluster.host("host", version)
        if not number:
            await submit_both(cluster, SLOW_S)
        await cluster.train()
        said = "newer" if version == "newer" else "older"
        await cluster.until_members(lambda members: {*members.trainers, *members.pservers} == {said})  # noqa: B023
        if number < len(versions) - 1:
            await cluster.stop("host", "master")
    found = await cluster.ends()
    await cluster.stop("host", "master")
    check(found, undisturbed)


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
@pytest.mark.parametrize("versions", RESTARTS, ids="-".join)
async def test_a_run_is_taken_up_by_another_version(
    trireme: Command,
    trees: Trees,
    versions: tuple[str, ...],
    strategy: str,
    undisturbed: dict[str, torch.Tensor],
) -> None:
    made = trireme.folder / "made"
    made.touch()
    noted = f'    Path("{made}").open("a").write("x")\n    time.sleep'
    loss = slowable_loss(trireme.folder / "slow", SLOW_S).replace("    time.sleep", noted)
    (trireme.folder / "slow").touch()
    script = write_script(trireme.folder, loss=loss, evaluation=EVALUATION)
    pservers = 1 if strategy == "parameter_server" else 0
    for number, version in enumerate(versions):
        before = made.stat().st_size
        asked = ["--epochs", EPOCHS, "--strategy", strategy, "--trainers", 1, "--pservers", pservers]
        with (trireme.folder / f"{number}.log").open("w") as log:
            process = trireme.start(
                *("run", script, *asked, "--json"), stderr_to=log, PYTHONPATH=trees.search_path(version)
            )
        begun = partial(grew, made, before)
        await until(lambda: begun() or process.poll() is not None, "it to train", LIMIT_S)  # noqa: B023
        if number == len(versions) - 1:
            (trireme.folder / "slow").unlink()
        else:
            process.send_signal(signal.SIGINT)
        done = await asyncio.to_thread(trireme.end_of, process)
        assert done.code == (0 if number == len(versions) - 1 else exit_codes.INTERRUPTED), log_of(
            trireme, number
        )
    result = json.loads(done.out.splitlines()[-1])
    assert same_bits(torch.load(result["exports"]["state_dict"], weights_only=True), undisturbed)


def log_of(trireme: Command, number: int) -> str:
    return (trireme.folder / f"{number}.log").read_text()[-3000:]


def grew(file: Path, before: int) -> bool:
    return file.stat().st_size >= before + STEPS * LANES
