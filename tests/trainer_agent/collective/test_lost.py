"""A version that is of no use any more is forgotten, and nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer_agent.collective.test_replica import compute, record
from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.server import ShareServer
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Exchange, JobSpec, JobState, Phase, Strategy, TrainerList


def alone(
    clip_grad_norm: float | None = None, step_in: Any = None
) -> tuple[CollectiveGroup, Directory, GroupView]:
    """A trainer that reaches nobody."""
    nobody: Any = None
    made: Any = compute()
    directory = Directory(nobody, Keys("job"))
    dataset = {"kind": "text_lines", "urls": ("-",)}
    common: dict[str, Any] = {"dataset": dataset, "strategy": Strategy.COLLECTIVE, "pservers": 0}
    spec = JobSpec(job="job", script="s.py", storage="s", lanes=1, clip_grad_norm=clip_grad_norm, **common)
    view = GroupView(directory, nobody, "me", made.layout.slot_count)
    ports = CollectivePorts(ShareServer("job", "me"), Exchange(url=""))
    standing: Any = SimpleNamespace(certain=nobody, set=lambda **_: None, without_doubt=lambda: None)
    means = MeanGradients(view, nobody, made, nobody, standing, spec, ports)
    replica = Replica(made, Clipping.of(spec))
    return CollectiveGroup(means, replica, made, spec, step_in=step_in), directory, view


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_checkpoint_that_is_loaded_before_the_lost_version_is_forgotten_stays(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own loop uses the parameters. Whoever loads the checkpoint waits for it, and so does the
    one who then forgets what was lost."""
    forming = asyncio.Event()

    async def form(_: MeanGradients, __: Group) -> None:
        if not forming.is_set():
            forming.set()
            raise Gone("no trainer of generation 1 has its version")

    async def load() -> None:
        async with collective.in_use:
            collective.means.stop()
            collective.replica.loaded(record(6), 3, "c")
            collective.start()

    monkeypatch.setattr(MeanGradients, "form", form)
    collective, directory, view = alone()
    collective.replica.begin(lanes=1)
    collective.start()
    running = asyncio.ensure_future(collective.run())
    try:
        async with asyncio.timeout(5):
            async with collective.in_use:
                loading = asyncio.ensure_future(load()) if loaded else None
                await asyncio.sleep(0)
                directory.state = JobState(phase=Phase.RUNNING, generation=1)
                directory.trainers = TrainerList(generation=1, lanes=1, names=("me", "other"))
                view.follow()
                await forming.wait()
            while collective.means.lost or (loading is not None and not loading.done()):
                await asyncio.sleep(0)
    finally:
        running.cancel()
    assert collective.replica.version == (6 if loaded else None)
    assert collective.means.has == (6 if loaded else -1)


async def test_a_step_that_nobody_waits_for_any_more_has_its_norm() -> None:
    """Another generation begins while the optimizer's step runs in its thread."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def step_in(work: Any, *arguments: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return work(*arguments)

    collective, _, _ = alone(clip_grad_norm=1.0, step_in=step_in)
    collective.replica.begin(lanes=1)
    collective.start()
    store = collective.means.store
    assert store is not None
    kept = {
        number: block.kept[0].retain() if block.is_buffer else None for number, block in store.blocks.items()
    }
    store.complete(1, kept, record(1))
    pulling = asyncio.ensure_future(collective.pull(1))
    async with asyncio.timeout(5):
        await begun.wait()
        pulling.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        pulled = await collective.pull(1)
    assert pulled is not None
    assert pulled.grad_norm == 0.0
    assert store.history.record(1) == pulled
