"""The launcher renews the lease of a trainer whose event loop is held up, for a while, and of nobody who is
frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from trireme.launch.leases import VOUCH_S, Vouching
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.life_sign import FILE, LifeSign, ProcessorUse, read
from trireme_shared.platform.runtime import clock

TTL_S = 5.0
RUNS, STOPPED = ProcessorUse(1.0, stopped=False), ProcessorUse(1.0, stopped=True)
PID = 4711


def left_s(
    tmp_path: Path,
    after_s: float,
    use: ProcessorUse | None = RUNS,
    *,
    beats: bool = False,
    said: list[tuple[str, int, str]] | None = None,
    sign: Callable[[LifeSign], LifeSign] = lambda sign: sign,
) -> int:
    """What is left of the lease of a trainer that renewed it last at the begin, and showed a sign of life
    then (`beats`: ever since)."""

    said = [] if said is None else said

    async def main() -> int:
        store = SimulatedEtcd()
        etcd, file = Etcd(store.transport("launcher")), tmp_path / "trainer-0.life"
        lease = await Etcd(store.transport("trainer")).grant(TTL_S)
        child: Any = SimpleNamespace(pid=PID, environment={FILE: str(file)})

        def show() -> None:
            file.write_bytes(sign(LifeSign(PID, lease.id, TTL_S, clock.monotonic())).to_bytes())

        show()
        vouching = asyncio.ensure_future(
            Vouching(etcd, lambda *told: said.append(told), lambda _: use).run(lambda: {"trainer-0": child})
        )
        end = clock.monotonic() + after_s
        while clock.monotonic() < end:
            await asyncio.sleep(0.25)
            if beats:
                show()
        vouching.cancel()
        return await etcd.time_to_live(lease.id)

    return int(run_virtually(main))


def test_a_trainer_whose_code_keeps_the_interpreter_keeps_its_lease(tmp_path: Path) -> None:
    said: list[tuple[str, int, str]] = []
    assert left_s(tmp_path, 40.0, said=said) > 0
    cause = (
        "code of the user keeps Python's interpreter for 5 s now: its lease is renewed for it, until "
        "60 s are over"
    )
    assert said == [("trainer-0", PID, cause)]


def test_its_lease_runs_out_if_that_takes_too_long(tmp_path: Path) -> None:
    said: list[tuple[str, int, str]] = []
    assert left_s(tmp_path, VOUCH_S - 1.0) > 0
    assert left_s(tmp_path, VOUCH_S + TTL_S + 1.0, said=said) < 0
    assert [text.rpartition(": ")[2] for *_, text in said][1:] == ["its lease runs out"]


@pytest.mark.parametrize("use", [STOPPED, None])
def test_a_process_that_is_frozen_or_gone_loses_its_lease(tmp_path: Path, use: ProcessorUse | None) -> None:
    assert left_s(tmp_path, TTL_S + 1.0, use) < 0


def test_a_trainer_whose_loop_runs_renews_its_lease_itself_or_loses_it(tmp_path: Path) -> None:
    """It may be cut off from etcd, which the launcher is not."""
    assert left_s(tmp_path, TTL_S + 1.0, beats=True) < 0


def test_the_sign_of_a_process_before_this_one_says_nothing(tmp_path: Path) -> None:
    assert left_s(tmp_path, TTL_S + 1.0, sign=lambda sign: replace(sign, pid=PID - 1)) < 0


def test_a_sign_that_is_half_written_is_none(tmp_path: Path) -> None:
    file = tmp_path / "sign"
    for content in (b"", b"\0" * 36, LifeSign(1, 2, 3.0, 4.0).to_bytes()[:-1] + b"x"):
        file.write_bytes(content)
        assert read(file) is None
    file.write_bytes(LifeSign(1, 2, 3.0, 4.0).to_bytes())
    assert read(file) == LifeSign(1, 2, 3.0, 4.0)
    assert read(tmp_path / "none") is None
