"""User errors, other models, crashes while initialising: the job goes on, or ends with one clear reason."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import LayoutMismatch
from shared.etcd import Etcd, Put
from shared.keys import Keys
from shared.records import Phase, TrainerMember
from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.membership.initialise import check_layout
from trainer_agent.membership.lease import Membership

POISONED = """
def loss(model, batch):
    if (batch["x"][:, 0] == POISON).any():
        raise ValueError("poisoned record")
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""


async def test_an_error_in_the_first_step_fails_the_job_with_the_users_traceback_and_task(tmp_path):
    script = write_script(tmp_path, loss="def loss(model, batch):\n    return batch['nothing']\n")
    async with cluster(spec_for(script, lanes=2), 2) as made:
        state = await made.ended()
        codes = [await asyncio.wait_for(task, 10) for task in made.running.values()]
    assert (state.phase, codes) == (Phase.FAILED, [1, 1])
    assert (state.failure.error_type, state.failure.message) == ("KeyError", "'nothing'")
    assert "return batch['nothing']" in state.failure.traceback
    assert "trainer_agent" not in state.failure.traceback
    assert f"{tmp_path}/x.npy records " in state.failure.task


async def test_a_lane_skips_a_task_that_always_fails(tmp_path):
    poison = "import numpy as np\nPOISON = float(np.load({folder!r} + '/x.npy')[-1][0])\n"
    script = write_script(tmp_path, loss=POISONED, poison=poison)
    common = {
        "lanes": 2,
        "records_per_task": 10,
        "max_discarded_fraction": 0.5,
        "max_user_failures": 99,
        "shuffle": False,
    }
    found = []
    for trainers in (1, 2):
        spec = spec_for(script, **common, storage=str(tmp_path / str(trainers)))
        async with cluster(spec, trainers) as made:
            state = await made.ended()
            assert state.phase is Phase.COMPLETED, state
            assert (state.result.discarded_tasks, state.result.discarded_records) == (2, 20)
            found.append(made.exported())
    assert differing(*found) == []


async def test_an_error_in_the_evaluation_is_reported_with_its_task(tmp_path):
    script = write_script(tmp_path, evaluation="def evaluate(model, batch):\n    return 1 / 0\n")
    spec = spec_for(script, evaluation_dataset=spec_for(script).dataset)
    async with cluster(spec, 1) as made:
        state = await made.ended()
    assert (state.phase, state.failure.error_type) == (Phase.FAILED, "ZeroDivisionError")
    assert state.failure.task.startswith("task evaluate-")


async def test_a_trainer_with_another_model_is_turned_away_and_the_job_goes_on(tmp_path):
    script = write_script(tmp_path)
    other = write_script(tmp_path, name="script_other", model="def model():\n    return nn.Linear(5, 3)\n")
    spec = spec_for(script, lanes=2, epochs=4, max_user_failures=2)
    async with cluster(spec, 1) as made:
        await made.version(1)
        made.add_trainer("stranger-x", other)
        outcome = await asyncio.wait_for(made.running["stranger-x"], 20)
        assert isinstance(outcome, LayoutMismatch)
        assert (await made.ended()).phase is Phase.COMPLETED


def test_a_layout_mismatch_says_what_differs(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from trainer_agent.model.torch_compute import TorchCompute
    from trainer_agent.script.user_module import load

    script = write_script(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        mine = TorchCompute(load(script), spec_for(script), executor).layout
        check_layout(mine, mine)
        other = write_script(tmp_path, name="script_other", model="def model():\n    return nn.Linear(5, 3)\n")
        theirs = TorchCompute(load(other), spec_for(other, block_bytes=512), executor).layout
    with pytest.raises(LayoutMismatch) as raised:
        check_layout(mine, theirs)
    assert f"digest {mine.digest[:12]}, the job has {theirs.digest[:12]}" in raised.value.message
    assert "the job has 19 float32 param" in raised.value.message
    assert "block_bytes (256, the job has 512)" in raised.value.message


async def test_initialising_is_finished_by_another_trainer_when_the_first_one_dies_in_it(tmp_path):
    script = write_script(tmp_path)
    common = {"lanes": 2, "pservers": 3}
    undisturbed = await trained(spec_for(script, **common, storage=str(tmp_path / "a")))
    async with cluster(spec_for(script, **common, storage=str(tmp_path / "b"))) as made:
        lease = await made.etcd.grant(5)
        await made.etcd.put(made.keys.init_lock, b"somebody-x", lease.id)  # took the lock and died
        made.add_trainer("trainer-0-x")
        made.add_trainer("trainer-1-x")
        await asyncio.sleep(0.3)
        assert not made.directory.init_done
        await made.etcd.revoke(lease.id)
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


# ---------------------------------------------------------------- membership


@pytest.fixture
async def member():
    from tests.equipment.etcd.simulated import SimulatedEtcd

    store = SimulatedEtcd()
    etcd = Etcd(store.transport("trainer"))
    keys = Keys("test")
    record = TrainerMember(trainer="trainer-0-x", url="", incarnation="x", host="here", pid=1)
    return store, etcd, keys, Membership(etcd, record)


async def test_a_trainer_holds_its_place_and_gives_it_back(member):
    _, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    found = await etcd.get(keys.trainer("trainer-0-x"))
    assert found.lease == membership.lease_id != 0
    async with asyncio.TaskGroup() as group:
        group.create_task(membership.hold())
        await asyncio.sleep(0)
        await membership.leave()
    assert await etcd.get(keys.trainer("trainer-0-x")) is None


async def test_a_trainer_whose_key_is_gone_has_lost_its_place(member):
    _, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    await etcd.revoke(membership.lease_id)
    async with asyncio.timeout(10):
        await membership.hold()


async def test_a_key_that_survived_an_outage_of_etcd_gets_a_new_lease(member):
    store, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    first = membership.lease_id
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(membership.hold())
        store.stop()
        await asyncio.sleep(2.2)  # longer than the lease lasts by the local clock
        store.start()
        async with asyncio.timeout(10):
            while membership.lease_id == first:
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.2)
        found = await etcd.get(keys.trainer("trainer-0-x"))
        assert (found.lease, holding.done()) == (membership.lease_id, False)
        holding.cancel()


async def test_a_name_that_is_taken_is_not_taken_over(member):
    _, etcd, keys, membership = member
    from shared.errors import PeerError

    await etcd.txn([], [Put(keys.trainer("trainer-0-x"), b"{}")])
    with pytest.raises(PeerError, match="is taken"):
        await membership.try_register(keys, 2.0)


async def test_a_model_that_cannot_be_written_fails_the_job_with_the_place_and_the_cause(tmp_path):
    spec = spec_for(write_script(tmp_path), epochs=1)
    async with cluster(spec, 1) as made:
        await made.directory.wait_for(lambda view: view.init_done, 20, "parameters")
        (tmp_path / "storage" / "export").write_text("a file where a folder should be")
        state = await made.ended()
    assert (state.phase, state.failure.task) == (Phase.FAILED, "task export-0")
    assert state.failure.message.startswith(f"the model cannot be written to {tmp_path}/storage/export: ")
