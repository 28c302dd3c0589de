"""A trainer that reaches a version later than the others, and in another generation: the checkpoint gets
whole all the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer_agent.collective.test_saving import Job, gradients, made, scenario


async def reached_late(job: Job, since: int | None) -> int | None:
    """All but c copy version 2 in generation 1 and go on; c, which had its mean gradients by then, reaches it
    in generation 2."""
    await job.step()
    for name, node in job.nodes.items():
        assert node.replica.record is not None
        node.replica.step(gradients(node.compute, 1), made(2))
        node.replica.swap()
        if name != "c":
            await node.copies.at_version(job.list)
    late = job.nodes["c"].copies
    late.remember(job.list)
    await job.group(("a", "b", "c", "d"))
    await job.seen()
    await late.at_version(job.list, since)
    await late.at_version(job.list, since)  # nothing is copied twice
    await asyncio.sleep(1.0)
    assert not late.waits
    latest = await job.latest()
    return latest.step if latest is not None else None


@pytest.mark.parametrize(("since", "saved"), [(1, 2), (None, None)])
def test_who_reaches_a_version_late_copies_it_for_the_generations_before_too(tmp_path, since, saved):
    async def run(job: Job) -> int | None:
        return await reached_late(job, since)

    assert scenario(run, tmp_path) == saved
