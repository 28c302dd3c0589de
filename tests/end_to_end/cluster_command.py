"""What the tests of clusters share: `trireme up` and its jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.command import Command, Done
from tests.end_to_end.local_cluster import EPOCHS, slowable_loss
from tests.end_to_end.scripts import EVALUATION, RECORDS, write_script
from tests.equipment.forked import ForkedProcess
from trireme.cli import exit_codes
from trireme.cli.targets import job_target
from trireme.view.job_address import open_job
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, NotReady, PeerError

LIMIT_S = 150
AWAY = (PeerError, NotReady, DeadlineExceeded)  # while another master takes over


def good(done: Done) -> Any:
    assert done.code == 0, f"{done.err}\n{done.out}"
    return json.loads(done.out)


@contextmanager
def up(trireme: Command, *arguments: object) -> Iterator[ForkedProcess]:
    """A cluster in the foreground; ended in order at the end, if it still runs. Its stderr goes to up.log."""
    log = (trireme.folder / "up.log").open("w")
    with log, trireme.fork("up", *arguments, out=log, err=log) as process:
        try:
            told_in(trireme.folder / "up.log", "cluster at http://", process)
            yield process
            if process.poll() is None:
                assert trireme.run("down").code == 0
            assert process.wait(60) == 0, (trireme.folder / "up.log").read_text()
        finally:
            process.kill()


def told_in(log: Path, words: str, process: ForkedProcess) -> None:
    deadline = time.monotonic() + LIMIT_S
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"{words!r} is not told: {log.read_text()}"
        time.sleep(0.05)


def job_when(trireme: Command, name: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Its status, as the command prints it once the condition holds. Meanwhile it is asked without starting a
    process each time."""

    async def holds() -> None:
        while True:
            with suppress(*AWAY, Conflict):
                target = job_target(name, trireme.folder / ".trireme", None)
                async with open_job(target.address, token=target.token) as (client, job):
                    while not condition((await client.get_job(job)).model_dump(mode="json")):
                        await asyncio.sleep(0.1)
                    return
            await asyncio.sleep(0.1)

    async def within_the_limit() -> None:
        async with asyncio.timeout(LIMIT_S):
            await holds()

    asyncio.run(within_the_limit())
    return good(answered(trireme, "status", name, "--json"))


def answered(trireme: Command, *arguments: object, **environment: str) -> Done:
    """What the command gives once a master leads: one of a busy machine may lose its lease."""
    deadline = time.monotonic() + LIMIT_S
    while (done := trireme.run(*arguments, **environment)).code in (
        exit_codes.UNREACHABLE,
        exit_codes.TIMED_OUT,
    ):
        assert time.monotonic() < deadline, done
    return done


def is_at(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda job: job["standing"] == "COMPLETED" or (job["progress"]["step"] or 0) >= step


def script_in(folder: Path, slow_s: float = 0.4) -> Path:
    """It trains very slowly while the file `slow` exists, so that a job lasts until everything is done to
    it."""
    (folder / "mine").mkdir()
    (folder / "slow").touch()
    return write_script(folder / "mine", loss=slowable_loss(folder / "slow", slow_s), evaluation=EVALUATION)


def model_of(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    assert (job["standing"], job["result"]["trained_records"]) == ("COMPLETED", EPOCHS * RECORDS), job
    return torch.load(job["result"]["exports"]["state_dict"], weights_only=True)
