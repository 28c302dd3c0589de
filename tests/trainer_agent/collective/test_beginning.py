"""The first values of a collective job, of a trainer that learns late that the job has gone on from them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.trainer_agent.collective.test_replica import begun, record
from trainer_agent.collective.member import begin_together
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, Phase


class Away:
    """etcd, which is not reached. `asked`: it was tried."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def txn(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        raise PeerError("etcd is not reached")

    get = range = txn


async def test_a_checkpoint_that_was_loaded_meanwhile_is_kept():
    """Etcd was not reached while others began the job, trained and died. When it is, the job goes back to a
    checkpoint, which is loaded at once: before it is looked again for the first values."""
    compute, replica = begun()
    etcd: Any = Away()
    directory = Directory(etcd, Keys("job"))
    given: dict[str, Any] = {
        "dataset": {"kind": "text_lines", "urls": ("-",)},
        "strategy": "collective",
        "pservers": 0,
    }
    spec = JobSpec(job="job", script="s.py", storage="s", lanes=1, **given)
    membership: Any = SimpleNamespace(record=SimpleNamespace(trainer="late"), lease_id=1)
    collective: Any = SimpleNamespace(replica=replica)
    beginning = asyncio.ensure_future(
        begin_together(spec, directory, etcd, membership, compute, collective, None)  # type: ignore[arg-type]
    )
    async with asyncio.timeout(10):
        await etcd.asked.wait()
        await asyncio.sleep(0)
        directory.state = JobState(phase=Phase.ROLLING_BACK, generation=3, timeline=3, checkpoint="c")
        directory.layout, directory.init_done = compute.layout, True
        replica.loaded(record(6), 3, "c")
        assert await beginning
    assert replica.version == 6
