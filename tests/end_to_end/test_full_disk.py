"""The disk under a run's folder is full: one message, no stack trace, and the same command resumes the
job."""

from __future__ import annotations

import json

import pytest
import torch

from tests.end_to_end.command import wait_for_step
from tests.end_to_end.local_cluster import (
    EPOCHS,
    STEPS,
    cluster_of,
    completed,
    reach_step,
    same_bits,
    spec_of,
)
from tests.equipment.small_disk import disk_of, fill
from trireme.cli.exit_codes import DISK_FULL
from trireme_shared.platform.etcd.embedded import find_binary

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.soak  # for its length
def test_a_disk_that_fills_up_ends_the_run_in_order_and_once_there_is_room_it_resumes(
    trireme, tmp_path, undisturbed
):
    script = spec_of(tmp_path).script
    with disk_of(tmp_path / "disk", "200m") as disk:
        arguments = (
            "run",
            script,
            "--data-dir",
            disk,
            "--epochs",
            EPOCHS,
            "--set",
            "checkpoint_every_steps=5",
        )
        with trireme.begin(*arguments) as process:
            wait_for_step(trireme, STEPS // 4, disk)
            filler = fill(disk)
            done = trireme.end_of(process)
        assert done.code == DISK_FULL, done.err
        assert done.err.count("error: ") == 1
        assert f"error: the disk of {disk / 'script'} is full (0 MiB are free)" in done.err
        assert "hint: free at least 256 MiB there, then the same command resumes the job" in done.err
        assert "Traceback" not in done.err

        filler.unlink()
        done = trireme.run(*arguments, "--json")
        assert done.code == 0, done.err
        assert "job script is unfinished: it resumes" in done.err
        exported = json.loads(done.out)["exports"]["state_dict"]
        assert same_bits(torch.load(exported, weights_only=True), undisturbed)


def test_a_disk_without_room_for_etcd_is_told_at_the_start(trireme, tmp_path):
    with disk_of(tmp_path / "disk", "8m") as disk:
        done = trireme.run("run", spec_of(tmp_path).script, "--data-dir", disk, "--no-check")
    assert (done.code, done.out) == (DISK_FULL, ""), done.err
    assert done.err.count("error: ") == 1
    assert "is full" in done.err
    assert "etcd cannot start" in done.err
    assert "Traceback" not in done.err


ETCD = """#!/bin/bash
if [ "$1" = --version ] || [ -e {told} ]; then exec {etcd} "$@"; fi
setpriv --pdeathsig KILL {etcd} "$@" &
while [ ! -e {end} ]; do sleep 0.05; done
touch {told}
kill -KILL $!
echo "walpb: write: no space left on device"
exit 1
"""


async def test_an_etcd_that_ends_of_a_full_disk_when_there_is_room_again_is_started_again(
    tmp_path, undisturbed, monkeypatch
):
    script, end = tmp_path / "etcd", tmp_path / "end"
    script.write_text(ETCD.format(etcd=find_binary(), told=tmp_path / "told", end=end))
    script.chmod(0o755)
    monkeypatch.setenv("ETCD_BIN", str(script))
    async with cluster_of(spec_of(tmp_path), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 10)
        end.touch()
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"etcd": 1}
