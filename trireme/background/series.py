"""The metrics of a run as columns: of its master while one leads, else from its storage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from trireme.cli.history.metrics import Found, OfMaster, Row, stored
from trireme.cli.targets import token_of_run
from trireme.launch import run_folder
from trireme.view.job_address import client_of
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    PeerError,
    TriremeError,
)
from trireme_shared.protocol.metrics import LOSS
from trireme_shared.protocol.records import Dispatch, JobSpec

ANSWER_S = 60.0
T = TypeVar("T")


def columns_of(
    folder: Path, spec: JobSpec, names: Sequence[str], by: str, *, running: bool
) -> dict[str, list[Any]]:
    """`names` empty: all. Raises InvalidArgument, NotFound, Conflict, PeerError, DeadlineExceeded."""
    if by not in ("step", "epoch"):
        raise InvalidArgument(f'by = {by!r}: metrics are by "step" or by "epoch"')
    if spec.dispatch is Dispatch.ETCD:
        raise Conflict("jobs without a master keep no metrics by step", hint="status() tells the loss")
    rows = outside_any_loop(
        _rows_of(folder, spec, names, by, running=running), ANSWER_S, f"metrics of job {spec.job}"
    )
    return columns(by, rows)


def columns(by: str, rows: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[Any]]:
    """`rows`: (place, value) of each metric. All columns are as long; None where a metric has no value."""
    values = {name: dict(points) for name, points in rows.items()}
    places = sorted({place for points in values.values() for place in points})
    return {by: places, **{name: [points.get(place) for place in places] for name, points in values.items()}}


def spec_in(folder: Path) -> JobSpec:
    return JobSpec.from_bytes((folder / "spec.json").read_bytes())


def losses_in(folder: Path, most: int) -> list[tuple[float, float]]:
    """(step, loss) of a run that has ended; none if they lie elsewhere, or cannot be read."""
    try:
        spec = spec_in(folder)
        if files.local_path(spec.storage) is None:
            return []
        rows = outside_any_loop(_losses(spec, most), ANSWER_S, f"losses of job {spec.job}")
    except (OSError, ValueError, TriremeError):
        return []
    return [(float(row["step"]), float(row["mean"])) for row in rows]


async def _losses(spec: JobSpec, most: int) -> list[Row]:
    return await (await stored(spec, "step")).points(LOSS, most=most)


async def _rows_of(
    folder: Path, spec: JobSpec, names: Sequence[str], by: str, *, running: bool
) -> dict[str, list[tuple[int, float]]]:
    facts = run_folder.read_json(folder / run_folder.RUN_FILE) if running else None
    if facts is not None:
        with suppress(Conflict, PeerError):  # it ends just now, or another master is about to lead
            async with client_of(str(facts["url"]), token_of_run(folder)) as client:
                return await _read(Found(spec.job, OfMaster(client, spec.job), over=False, by=by), names)
    return await _read(await stored(spec, by), names)


async def _read(found: Found, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    wanted = names or [summary["name"] for summary in await found.source.summaries()]
    return {name: [(found.place(row), row["mean"]) for row in await found.points(name)] for name in wanted}


def outside_any_loop(work: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
    """Run it in a thread of its own: in a notebook this thread runs a loop already. Raises
    DeadlineExceeded."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s") from error
