"""examples/charlm as `trireme run` trains it, resized 1 -> 4 -> 2 trainers and 1 -> 3 -> 2 parameter servers
while it trains, with a SIGKILL of a random process in the middle of each resize: the bits of an undisturbed
run, and each record computed in each epoch."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable
from contextlib import suppress

import pytest

from tests.soak.run import POLL_S, Run, SoakError, asked
from tests.soak.soak import undisturbed
from tests.soak.verify import check_bits, check_exactly_once, check_records
from trireme.cli.chaos import alive
from trireme.client import ONLY_JOB, AsyncClient
from trireme_shared.protocol.rest import ResizeView

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]
SIZES = ((3, 4), (2, 2))  # parameter servers and trainers
ROLES = ("trainer", "pserver", "pserver", "master")
EPOCHS = 3
SLOWLY_S = 0.1
LIMIT_S = 120.0
MIDDLE_S = 1.5


async def trains(run: Run, step: int) -> None:
    while ((await asked(run, lambda client: client.get_job(ONLY_JOB))).progress.step or 0) < step:
        await asyncio.sleep(POLL_S)


async def resized(run: Run, number: int, rng: random.Random) -> str:
    """The phase in which it ended."""
    pservers, trainers = SIZES[number]
    key = f"resize-{number}"
    numbers = {"pservers": pservers, "trainers": trainers}
    made = await asked(run, lambda client: client.create_resize(ONLY_JOB, key=key, **numbers))
    await asyncio.sleep(rng.random() * MIDDLE_S)
    role = rng.choice(ROLES)
    victims = [pid for name, pid in alive(run.folder).items() if name.startswith(role)]
    with suppress(ProcessLookupError):
        os.kill(rng.choice(victims), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S

    def look(client: AsyncClient) -> Awaitable[ResizeView]:
        return client.get_resize(ONLY_JOB, made.operation_id, wait_s=1.0)

    while (found := await asked(run, look)).state == "RUNNING":
        if time.monotonic() > deadline:
            raise SoakError(f"resize {number} did not end within {LIMIT_S:g} s: {found}")
    return found.phase


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    return asyncio.run(undisturbed(tmp_path_factory.mktemp("charlm") / "undisturbed", EPOCHS))


@pytest.mark.parametrize("seed", range(20))
def test_a_process_killed_in_each_resize_of_charlm_costs_no_bit(tmp_path, left_alone, seed):
    rng = random.Random(seed)

    async def disturbed():
        run = Run(tmp_path / "disturbed", EPOCHS, trainers=1, pservers=1, standbys=1, spares=0)
        with run.cleaned_up():
            run.slow_down(SLOWLY_S)
            run.start()
            await trains(run, 3)
            phases = [await resized(run, number, rng) for number in range(len(SIZES))]
            run.slow_down(0)
            return await run.end(), phases

    trained, phases = asyncio.run(disturbed())
    assert set(phases) <= {"COMMITTED", "ROLLED_BACK", "FAILED"}
    check_exactly_once(left_alone, EPOCHS)
    check_records(trained, EPOCHS)
    check_bits(left_alone, trained)
