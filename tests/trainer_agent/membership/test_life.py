"""A trainer tells the master when code of the user keeps the interpreter until its lease is lost."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process, run_virtually
from trainer_agent.membership.lease import KEPT, Life, Membership
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership import life_sign
from trireme_shared.platform.runtime import begun, clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import FailTask, TrainerMember, UserFailure
from trireme_shared.protocol.records.tasks import READING, BegunWork

TTL_S = 5.0
WORK = BegunWork("7", 0, READING, "train.json", 0, 64)


class Reports:
    """A master's port that notes what is reported."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, FailTask]] = []
        self.failures: list[UserFailure] = []

    async def fail_task(self, task_id: str, report: FailTask) -> None:
        self.tasks.append((task_id, report))

    async def report_failure(self, _: str, failure: UserFailure) -> None:
        self.failures.append(failure)


def told(
    tmp_path: Path,
    held_s: float,
    *,
    work: bool = True,
    processor_s: float | None = None,
    vouched: bool = False,
    times: int = 1,
) -> Reports:
    """What is reported after `held_s` without a turn of the event loop, in which the process used so much of
    a processor."""
    reports, spent = Reports(), [0.0]

    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("trainer"))
        membership = Membership(
            etcd, TrainerMember(trainer="trainer-0-x", url="", incarnation="x", host="h", pid=1)
        )
        await membership.register(Keys("j"), TTL_S)
        process, port = Process("trainer-0"), reports
        life: Any = Life(etcd, "trainer-0-x", port)  # type: ignore[arg-type]
        running = [process.spawn(life.run(membership)), process.spawn(membership.hold())]
        await asyncio.sleep(2.0)
        for _ in range(times):
            with begun.at(WORK.to_bytes()) if work else nullcontext():
                process.freeze()
                for _ in range(round(held_s)):
                    await asyncio.sleep(1.0)
                    if vouched:
                        await etcd.renew(membership.lease_id)
                spent[0] += held_s if processor_s is None else processor_s
                process.thaw()
            await asyncio.sleep(6.0)
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    begun.open_journal(tmp_path / "journal").begin("trainer-0-x")
    try:
        with replaced(clock, "process_seconds", lambda: spent[0]):
            run_virtually(main)
    finally:
        begun.close_journal()
    return reports


def test_records_at_which_the_lease_was_lost_are_named_and_counted_as_a_death_there(tmp_path: Path) -> None:
    [(task, report)] = told(tmp_path, 15.0).tasks
    assert (task, report.died_at, report.epoch, report.failure.error_type) == ("7", READING, 0, KEPT)
    assert report.failure.message.startswith(
        "trainer-0 lost its lease: its Python interpreter was kept for 15 s while it read the "
        "records of task 7 (train.json records 0-63); "
    )


def test_each_loss_counts_also_of_the_same_process(tmp_path: Path) -> None:
    names = [report.trainer for _, report in told(tmp_path, 15.0, times=3).tasks]
    assert len(set(names)) == 3, "a trainer counts once at a place, so the lease is in the name"


def test_code_outside_of_tasks_is_a_failure_of_the_users_code(tmp_path: Path) -> None:
    reports = told(tmp_path, 15.0, work=False)
    assert not reports.tasks
    [failure] = reports.failures
    assert (failure.error_type, failure.task) == (KEPT, "")


@pytest.mark.parametrize(
    ("held_s", "more"),
    [
        pytest.param(15.0, {"processor_s": 0.1}, id="frozen"),
        pytest.param(15.0, {"vouched": True}, id="its lease was renewed in its place"),
        pytest.param(3.0, {}, id="shorter than the lease"),
    ],
)
def test_nobody_is_blamed(tmp_path: Path, held_s: float, more: dict[str, Any]) -> None:
    reports = told(tmp_path, held_s, **more)
    assert (reports.tasks, reports.failures) == ([], [])


def test_the_sign_of_life_has_the_lease_and_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(life_sign.FILE, str(tmp_path / "life"))
    file = life_sign.LifeFile()
    file.write(12, 5.0)
    sign = life_sign.read(tmp_path / "life")
    assert sign is not None
    assert (sign.lease, sign.ttl_s, sign.is_late) == (12, 5.0, False)
    file.close()
    assert not (tmp_path / "life").exists()
