"""The launcher asks for the leading master while masters come and go."""

from __future__ import annotations

import asyncio
import random

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme.launch.cluster import LocalCluster
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.members import MasterAddress

KEYS = Keys("job")
SPEC = JobSpec(job="job", script="s.py", dataset={"kind": "csv", "urls": ["x.csv"]}, storage="/tmp/x")


def test_a_master_that_is_gone_when_its_address_is_read_is_waited_for_again(tmp_path):
    """An assertion failed there, and ended the job."""

    async def scenario():
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        cluster = LocalCluster(SPEC, tmp_path)
        cluster.final = asyncio.get_running_loop().create_future()
        cluster.directory = directory = Directory(etcd, KEYS)

        async def dies_at_once():
            await directory.wait_for(lambda view: view.master is not None, 60, "a master")
            directory.master = None
            await asyncio.sleep(1)
            await etcd.put(KEYS.master_address, MasterAddress(url="http://second", term=2).to_bytes())

        async with asyncio.TaskGroup() as group:
            following = group.create_task(directory.run())
            asked = group.create_task(cluster.master_url(60))
            await asyncio.sleep(1)
            group.create_task(dies_at_once())
            await etcd.put(KEYS.master_address, MasterAddress(url="http://first", term=1).to_bytes())
            assert await asked == "http://second"
            following.cancel()
        await etcd.close()

    rng = random.Random(1)
    run_virtual(VirtualLoop(rng), scenario(), rng)
