"""The loop the simulation stands on: virtual, bounded, repeatable, with processes that freeze and die."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
import warnings

import pytest

from tests.equipment.virtual_loop import Deadlock, Process, Runaway, VirtualLoop, run
from trireme_shared.platform.runtime import clock, ids


def simulate(main, *, seed=0, **bounds):
    return run(VirtualLoop(random.Random(seed), **bounds), main, random.Random(seed))


def test_time_jumps_to_the_next_timer_and_no_real_time_passes():
    async def main():
        before = clock.monotonic()
        await asyncio.sleep(3600)
        return clock.monotonic() - before

    assert simulate(main()) == pytest.approx(3600)


def test_waiting_for_nothing_is_a_deadlock():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        simulate(main())


def test_virtual_time_is_bounded():
    with pytest.raises(Runaway):
        simulate(asyncio.sleep(100), max_seconds=99)


def test_spinning_is_bounded():
    async def main():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Runaway):
        simulate(main(), max_callbacks=1000)


def test_threads_and_sockets_are_refused_and_everything_is_restored():
    async def main():
        with pytest.raises(AssertionError):
            await asyncio.to_thread(print)
        with pytest.raises(AssertionError):
            threading.Thread(target=print).start()
        with pytest.raises(AssertionError):
            await asyncio.open_connection("127.0.0.1", 1)
        with socket.socket() as plain, pytest.raises(AssertionError):
            plain.bind(("127.0.0.1", 0))
        return ids.new_id()

    source = ids.source
    assert simulate(main(), seed=5) == simulate(main(), seed=5)
    assert ids.source is source
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def test_a_killed_process_runs_no_cleanup():
    seen = []

    async def work():
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("cleanup")

    async def main():
        process = Process("victim")
        process.spawn(work())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(100)
        assert seen == []
        process.dead = False
        process.release()
        await asyncio.gather(*process.tasks)

    simulate(main())


def test_a_process_that_dies_in_the_moment_of_its_start_leaves_nothing_behind():
    began = []

    async def work():
        began.append(True)

    async def main():
        process = Process("short-lived")
        process.spawn(work())
        process.kill()
        await asyncio.sleep(1)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        simulate(main())
        gc.collect()
    assert (began, [str(warning.message) for warning in told]) == ([], [])


def test_a_frozen_process_misses_time_and_then_goes_on():
    async def work(ticks):
        for _ in range(5):
            await asyncio.sleep(1)
            ticks.append(clock.monotonic())

    async def main():
        process, ticks = Process("frozen"), []
        process.spawn(work(ticks))
        await asyncio.sleep(2.5)
        process.freeze()
        await asyncio.sleep(7)
        process.thaw()
        await asyncio.sleep(10)
        return ticks

    assert simulate(main()) == pytest.approx([1, 2, 9.5, 10.5, 11.5])


def test_processes_interleave_by_seed_and_keep_their_own_order():
    async def work(name, seen):
        for number in range(3):
            seen.append((name, number))
            await asyncio.sleep(0)

    async def main():
        seen = []
        tasks = [Process(name).spawn(work(name, seen)) for name in "abc"]
        await asyncio.gather(*tasks)
        return seen

    orders = {tuple(simulate(main(), seed=seed)) for seed in range(10)}
    assert len(orders) > 3
    assert orders == {tuple(simulate(main(), seed=seed)) for seed in range(10)}
    for order in orders:
        assert all([n for name, n in order if name == each] == [0, 1, 2] for each in "abc")


def test_sets_of_tasks_iterate_in_order_of_creation():
    async def main():
        tasks = {asyncio.ensure_future(asyncio.sleep(index, index)) for index in range(20)}
        done, _ = await asyncio.wait(tasks)
        return [task.result() for task in done]

    assert simulate(main()) == simulate(main())
