"""A trainer runs the files that its job was created with, or those of the spec that a new start of the job
brings."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from trainer_agent import process
from trainer_agent.process import find_script
from trireme.script_source import digests_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.local_script import LocalScripts, ScriptChanged
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Npy

KEYS = Keys("job")


def spec_with(**changes: object) -> JobSpec:
    dataset = Npy("x.npy", aligned=True)
    return JobSpec(job="job", storage="-", dataset=dataset, **changes)


async def test_a_changed_script_is_run_once_a_new_start_of_the_job_names_it(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    etcd = Etcd(SimulatedEtcd(rng=random.Random(1)).transport("trainer"))

    async def put_spec() -> None:
        await etcd.put(KEYS.spec, spec_with(script=str(script), sources=digests_of(script)).to_bytes())

    await put_spec()
    directory, scripts = Directory(etcd, KEYS), LocalScripts(etcd, "trireme")
    following = asyncio.create_task(directory.run())
    try:
        await directory.wait_for(lambda view: view.spec is not None, 5, "the spec")
        assert await find_script(directory, scripts) == script
        script.write_text("import os")
        monkeypatch.setattr(process, "NEW_SPEC_S", 0.05)
        with pytest.raises(ScriptChanged) as caught:
            await find_script(directory, scripts)
        assert "stop the job and start it again" in caught.value.hint
        monkeypatch.setattr(process, "NEW_SPEC_S", 30)
        waiting = asyncio.create_task(find_script(directory, scripts))
        await asyncio.sleep(0)
        await put_spec()
        assert await waiting == script
    finally:
        following.cancel()
        await asyncio.wait([following])
