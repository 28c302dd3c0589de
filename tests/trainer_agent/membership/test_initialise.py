"""Who gives the parameter servers their first values, and who is refused."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.collective.cluster import cluster as collective
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.agent import LEASE_LOST, OK
from trainer_agent.membership.lease import check_layout, ensure_initialised, followed
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import LayoutMismatch
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase, PserverMember, SlotMap, Strategy
from trireme_shared.protocol.records.layout import (
    MOST_CONSTANTS,
    Layout,
    OptimizerSpec,
    RowInit,
    RowOptimizer,
    TableSpec,
)


async def test_a_trainer_with_another_model_is_turned_away_and_the_job_goes_on(tmp_path):
    script = write_script(tmp_path)
    other = write_script(tmp_path, name="script_other", model="def model():\n    return nn.Linear(5, 3)\n")
    spec = spec_for(script, lanes=2, epochs=12, max_user_failures=2)
    async with cluster(spec, 1) as made:
        await made.version(1)
        for number in range(4):  # twice as often as failures of the job's own script are borne
            made.add_trainer(f"stranger-{number}", other)
            outcome = await asyncio.wait_for(made.running[f"stranger-{number}"], 20)
            assert isinstance(outcome, LayoutMismatch)
        told = [event.message for event in made.master.events.after(0, 1000)]
        assert not [
            message
            for message in told
            if "stranger" in message and ("joined" in message or "gone" in message)
        ]
        assert (await made.ended()).generation == 1, "nobody has joined or left"
        assert made.directory.state.phase is Phase.COMPLETED


def test_a_layout_mismatch_says_what_differs(tmp_path):
    script = write_script(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        mine = TorchCompute(load(script), spec_for(script), executor).layout
        check_layout(mine, mine)
        other = write_script(
            tmp_path, name="script_other", model="def model():\n    return nn.Linear(5, 3)\n"
        )
        theirs = TorchCompute(load(other), spec_for(other, block_bytes=512), executor).layout
    with pytest.raises(LayoutMismatch) as raised:
        check_layout(mine, theirs)
    assert f"digest {mine.digest[:12]}, the job has {theirs.digest[:12]}" in raised.value.message
    assert "the job has 19 float32 param" in raised.value.message
    assert "block_bytes (256, the job has 512)" in raised.value.message


def test_a_job_that_an_earlier_version_began_goes_on_unless_it_had_frozen_parameters(tmp_path):
    """Its layout does not say where parameters lie, and has no place for what is frozen at first."""
    model = "def model():\n    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3){})\n"
    none, some = (
        layout_of(write_script(tmp_path, f"of{len(change)}", model=model.format(change)))
        for change in ("", ".requires_grad_(False)")
    )
    earlier = {"sizes": (), "frozen": ()}
    check_layout(none, none.model_copy(update=earlier))
    with pytest.raises(LayoutMismatch) as raised:
        check_layout(some, some.model_copy(update={"frozen": ()}))
    assert "at first (without are the parameters number 2 to 3, of the job none)" in raised.value.message
    with pytest.raises(LayoutMismatch) as raised:
        check_layout(some, layout_of(write_script(tmp_path)).model_copy(update=earlier))
    assert "by an earlier version of Trireme" in raised.value.hint


def test_a_layout_mismatch_says_which_tables_differ_and_in_what():
    user = TableSpec(
        name="user", dim=4, optimizer=RowOptimizer(kind="sgd", lr=0.5), init=RowInit(kind="normal", scale=0.1)
    )
    other = user.model_copy(update={"dim": 8, "optimizer": RowOptimizer(kind="sgd", lr=0.25)})
    item = user.model_copy(update={"name": "item"})

    def layout(*tables: TableSpec) -> Layout:
        spec = OptimizerSpec(name="SGD", defaults={}, groups=())
        return Layout(segments=(), block_bytes=256, digest="", optimizer=spec, tables=tables)

    for mine, message in (
        ((item,), "embedding tables (item, which the job does not have; no user, which the job has)"),
        ((other,), "embedding tables (user: dim 8, the job has 4; user: optimizer.lr 0.25, the job has 0.5)"),
        ((item, user), "embedding tables (item, which the job does not have)"),
    ):
        with pytest.raises(LayoutMismatch, match=re.escape(message)):
            check_layout(layout(*mine), layout(user))


async def on_another_device(made, outcome_of):
    """A trainer on a CPU comes to a job that was initialised on a GPU."""
    await made.version(1)
    layout = made.directory.layout.model_copy(update={"device": "cuda"})
    await made.etcd.put(made.keys.layout, layout.to_bytes())
    await made.directory.wait_for(lambda view: view.layout.device == "cuda", 5, "the layout")
    made.add_trainer(outcome_of)
    return await asyncio.wait_for(made.running[outcome_of], 20)


@pytest.mark.parametrize(("mode", "device"), [("sync", "auto"), ("sync", "cpu"), ("async", "cpu")])
async def test_a_synchronous_job_has_one_kind_of_device(tmp_path, mode, device):
    spec = spec_for(write_script(tmp_path), mode=mode, device=device, lanes=2, epochs=8, max_user_failures=9)
    async with cluster(spec, 1) as made:
        assert made.computes["trainer-0-x"].layout.device == "cpu"
        outcome = await on_another_device(made, "late-x")
        assert (await made.ended()).phase is Phase.COMPLETED
    if mode == "async":
        assert outcome == OK
    elif device == "auto":
        assert outcome == LEASE_LOST
    else:
        assert isinstance(outcome, LayoutMismatch)
        assert outcome.message.startswith("this trainer computes on cpu, the job was initialised on cuda: ")
        assert outcome.hint == "start its trainers with device auto or cuda, or start a new job"


def test_auto_follows_the_device_of_the_job(tmp_path):
    spec = spec_for(write_script(tmp_path))
    layout = Layout(
        segments=(),
        block_bytes=256,
        digest="",
        optimizer=OptimizerSpec(name="SGD", defaults={}, groups=()),
        device="cuda",
    )
    assert followed(spec, None) == spec
    assert followed(spec, layout).device == "cuda"
    assert followed(spec, layout.model_copy(update={"device": ""})).device == "auto"
    for values in ({"device": "cpu"}, {"mode": "async"}):
        other = spec_for(write_script(tmp_path), **values)
        assert followed(other, layout) == other


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


@pytest.mark.parametrize("late", ["from the start", "meanwhile"])
async def test_initial_values_are_published_for_the_state_that_etcd_has(tmp_path, late):
    """A job may start over, with another slot map, before a trainer sees it: its values would be of a
    timeline that is over."""
    spec, keys = spec_for(write_script(tmp_path), pservers=1), Keys("late")
    etcd = Etcd(SimulatedEtcd().transport("trainer"))
    directory = Directory(etcd, keys)
    member = PserverMember(index=0, url="http://p", incarnation="p", host="h", pid=1)
    before, after = (JobState(timeline=timeline, generation=timeline) for timeline in (3, 7))
    sent, published = [], []

    async def goes_on() -> None:
        await etcd.put(keys.slots, SlotMap(version=2, owners=(0,)).to_bytes())
        await etcd.put(keys.state, after.to_bytes())

    class Connection:
        async def init(self, header, _blocks):
            sent.append((header.timeline, header.slots))
            published.append(await etcd.get(keys.init_done))
            if late == "meanwhile" and len(sent) == 1:
                await goes_on()

    await etcd.put(keys.pserver(0), member.to_bytes())
    await etcd.put(keys.pservers_desired, b"1")
    await etcd.put(keys.state, before.to_bytes())
    await etcd.put(keys.slots, SlotMap(version=1, owners=(0,)).to_bytes())
    directory.state, directory.slots = before, SlotMap(version=1, owners=(0,))
    directory.pservers, directory.pservers_desired = {0: member}, 1
    if late == "from the start":
        await goes_on()
    plain = OptimizerSpec(name="SGD", defaults={}, groups=())
    compute = SimpleNamespace(
        layout=Layout(segments=(), block_bytes=256, digest="d", optimizer=plain),
        may_initialise=True,
        initial_lane_zero=lambda: None,
    )
    lease = await etcd.grant(60)
    membership = SimpleNamespace(record=SimpleNamespace(trainer="t"), lease_id=lease.id)
    initialising = asyncio.create_task(
        ensure_initialised(spec, directory, etcd, membership, compute, lambda _: Connection())
    )
    await asyncio.sleep(0.1)
    assert sent == ([] if late == "from the start" else [(3, 1)])
    assert await etcd.get(keys.layout) is None
    following = asyncio.create_task(directory.run())
    assert await asyncio.wait_for(initialising, 20)
    following.cancel()
    assert sent[-1] == (7, 2)
    assert published == [None] * len(sent)


def layout_of(script):
    with ThreadPoolExecutor(1) as executor:
        return TorchCompute(load(script), spec_for(script), executor).layout


TOWERS = """
    def model():
        towers = nn.ModuleDict({{kind: nn.Linear(5, 3) for kind in {names}}})
        return nn.Sequential(towers["near"], nn.ModuleDict(towers))
"""


def test_a_model_whose_parts_are_in_another_order_is_told_so_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    names = ["near", "far", "past"], ["past", "near", "far"]
    mine, job = (
        layout_of(write_script(tmp_path, name=f"script_{n}", model=TOWERS.format(names=order)))
        for n, order in enumerate(names)
    )
    with pytest.raises(
        LayoutMismatch, match="the parameters and buffers of the job's, but in another order"
    ) as raised:
        check_layout(mine, job)
    assert "made from a set of names" in raised.value.hint
    assert "PYTHONHASHSEED (it is 7 here)" in raised.value.hint


REQUIRED = """
    def optimizer(model):
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
"""
CONSTANTS = """
    import numpy as np, random, os
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
            self.features.requires_grad_(False)
            with torch.no_grad():
                self.features.weight.copy_(torch.from_numpy(np.random.standard_normal((8, 5))))
            self.register_buffer("mask", torch.from_numpy(np.random.random(8) < 0.5))
            self.register_buffer("order", torch.tensor(random.sample(range(8), 8), dtype=torch.int32))
            self.register_buffer("mean", torch.from_numpy(np.random.standard_normal(8)).float())
            {more}
        def forward(self, x): return self.head(self.features(x) * self.mask + self.mean)
    def model(): return Net()
"""


def test_constants_that_draw_from_any_seeded_generator_are_the_same_in_every_trainer(tmp_path):
    script = write_script(tmp_path, model=CONSTANTS.format(more=""), optimizer=REQUIRED)
    np.random.seed(1)  # noqa: NPY002
    job = layout_of(script)
    np.random.seed(2)  # noqa: NPY002
    mine = layout_of(script)
    check_layout(mine, job)
    assert [each.name for each in mine.constants] == ["features.weight", "features.bias", "mask", "order"]
    assert mine.constants == job.constants


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("with torch.no_grad(): self.features.bias.fill_(float(os.environ['PLACE']))", "features.bias"),
        ("self.mask[0] = int(os.environ['PLACE']) == 1", "mask"),
        ("self.order = self.order.roll(int(os.environ['PLACE']))", "order"),
    ],
)
def test_constants_of_ones_own_are_refused_by_name_with_both_values(tmp_path, monkeypatch, more, name):
    script = write_script(tmp_path, model=CONSTANTS.format(more=more), optimizer=REQUIRED)
    layouts = []
    for place in "01":
        monkeypatch.setenv("PLACE", place)
        layouts.append(layout_of(script))
    mine, job = ({each.name: each.digest for each in layout.constants} for layout in layouts)
    if mine == job:  # a mask that was so already
        pytest.fail("the constants do not differ")
    with pytest.raises(LayoutMismatch, match="other constants than the job began with") as raised:
        check_layout(*layouts)
    assert f"{name} (digest {mine[name]}, the job has {job[name]})" in raised.value.message
    assert "must give the same values on every host" in raised.value.hint
    # a layout of an earlier version
    check_layout(layouts[0].model_copy(update={"constants": None}), layouts[1])


def test_very_many_constants_are_compared_in_runs(tmp_path):
    model = """
        def model():
            frozen = nn.ModuleList([nn.Linear(1, 1) for _ in range(100)]).requires_grad_(False)
            with torch.no_grad(): frozen[{number}].bias.fill_({value})
            return nn.ModuleList([frozen, nn.Linear(5, 3)])
    """
    mine, job = (
        layout_of(
            write_script(
                tmp_path, f"many_{value}", model=model.format(number=70, value=value), optimizer=REQUIRED
            )
        )
        for value in (1, 2)
    )
    assert len(mine.constants) <= MOST_CONSTANTS
    with pytest.raises(
        LayoutMismatch, match=r"constants than the job began with: 0.70.weight to 0.\S+ \(digest"
    ):
        check_layout(mine, job)


@pytest.mark.parametrize("strategy", Strategy)
async def test_a_trainer_with_other_constants_is_turned_away_before_it_trains(
    tmp_path, monkeypatch, strategy
):
    more = "with torch.no_grad(): self.features.weight.mul_(float(os.environ['PLACE']))"
    script = write_script(tmp_path, model=CONSTANTS.format(more=more), optimizer=REQUIRED)
    monkeypatch.setenv("PLACE", "1")
    spec = spec_for(script, lanes=2, strategy=strategy, pservers=0 if strategy is Strategy.COLLECTIVE else 1)
    make = collective if strategy is Strategy.COLLECTIVE else cluster
    async with make(spec, 1) as made:
        await made.directory.wait_for(lambda view: view.init_done, 20, "the first values")
        monkeypatch.setenv("PLACE", "2")
        made.add_trainer("stranger")
        outcome = await asyncio.wait_for(made.running["stranger"], 20)
        assert isinstance(outcome, LayoutMismatch)
        assert "features.weight (digest" in outcome.message
        assert (await made.ended()).phase is Phase.COMPLETED
