"""max_staleness in a whole job with torch: a dead trainer is not waited for, and each minibatch counts once.
How old parameters get: tests/simulation."""

from __future__ import annotations

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.loops.test_async_tables import LOSS, MODEL
from tests.trainer_agent.loops.test_asynchronous import assert_exactly_once, job, spec_of, updates
from tests.trainer_agent.scripts import write_script
from trireme_shared.protocol.records import Phase


async def test_each_minibatch_counts_once_for_blocks_and_rows_although_a_trainer_dies(tmp_path):
    script = write_script(tmp_path, model=MODEL, loss=LOSS)
    spec = spec_of(script, push_every=1, pull_every=2, max_staleness=0, lr_staleness_modulation=True)
    async with cluster(spec, 3) as made:
        await updates(made, 60)
        await made.kill("trainer-0-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)
