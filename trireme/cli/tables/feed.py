"""`trireme table delta | feed | apply`: what changed in tables between checkpoints, as folders for online
serving (trainer_agent/tables/files.py).

checkpoints on the storage --newest, since the last folder of the feed--> next folder, marker last
feed: again and again, until the job is over
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trireme.cli import exit_codes
from trireme.cli.checkpoint import Answer, answer, choose, spec_of
from trireme.cli.targets import job_target
from trireme.view.job_address import AnyClient, OpenJob, call_any_master, open_job, wait_for_operation
from trireme.view.progress import say
from trireme_shared.checkpoints import stored
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import (
    CallerError,
    CheckpointUnusable,
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PeerError,
)
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.operations import Operation

if TYPE_CHECKING:
    from trainer_agent.tables.files import Done, TableDelta  # loads torch
    from trireme_shared.protocol.records.layout import TableSpec

AGAIN_S = 2.0


def delta(
    job: str | None,
    data_dir: Path | None,
    url: str | None,
    since: str | None,
    to: str | None,
    out: str,
    *,
    as_json: bool,
) -> int:
    """One folder: what changed from `since` (None: the last folder of the feed) to checkpoint `to` (None: the
    newest). Returns the exit code."""

    def work() -> Answer:
        written = write_next(spec_of(job, data_dir, url), files.absolute(out), since, to)
        if written is None:
            raise NotFound(f"{out} has no delta to be written: no checkpoint is newer than its last one")
        if not as_json:
            _tell(written, out)
        return written.model_dump(mode="json"), exit_codes.OK

    return answer(work, as_json=as_json)


def apply(base: str, deltas: Sequence[str], out: str, *, as_json: bool) -> int:
    """The tables of an export after these deltas, into `tables/` in `out`. Returns the exit code."""

    def work() -> Answer:
        # loads torch
        from trainer_agent.tables.files import (  # noqa: PLC0415
            FOLDER,
            SUFFIX,
            advanced,
            folders_of,
            names_in,
            read_table,
            write_tables,
        )

        folder, follows = files.join(base, FOLDER), folders_of(deltas)
        urls: dict[str, str] = {}
        steps: dict[str, int] = {}
        for name in names_in(folder):
            table = advanced(read_table(files.join(folder, name + SUFFIX)), name, follows)
            urls |= write_tables([table], files.absolute(out))
            steps[name] = table.version
        if not urls:
            raise InvalidArgument(
                f"{folder} holds no table", hint="give the folder of an export, in which tables/ is"
            )
        for name, step in () if as_json else steps.items():
            Console(soft_wrap=True).print(
                f"table {name}  step {step}  {urls[f'table {name}']}", highlight=False
            )
        return {"tables": urls, "steps": steps}, exit_codes.OK

    return answer(work, as_json=as_json)


def feed(
    job: str | None, data_dir: Path | None, url: str | None, out: str, every_s: float, *, as_json: bool
) -> int:
    """Write deltas until the job is over. Returns the exit code."""

    def work() -> Answer:
        spec, folder, count = spec_of(job, data_dir, url), files.absolute(out), 0
        goes_on = True
        while goes_on:
            began = clock.monotonic()
            goes_on = asyncio.run(_checkpointed(job, data_dir, url, every_s))
            written = None
            try:
                written = write_next(spec, folder, None, None)
            except (
                NotFound,
                CheckpointUnusable,
                OSError,
            ) as error:  # a newer checkpoint may have taken the place of what was read
                if not goes_on:
                    raise
                say(f"nothing is written now: {error}")
            if written is not None:
                count += 1
                if not as_json:
                    _tell(written, out)
            if goes_on:
                asyncio.run(asyncio.sleep(max(0.0, began + every_s - clock.monotonic())))
        return {"job": spec.job, "folder": folder, "written": count}, exit_codes.OK

    return answer(work, as_json=as_json)


async def _checkpointed(job: str | None, data_dir: Path | None, url: str | None, limit_s: float) -> bool:
    """Ask for a checkpoint and wait until it is there. False: the job is over, or nobody leads it: there will
    be none."""
    key = ids.new_id("feed")

    def connect() -> AbstractAsyncContextManager[OpenJob]:
        target = job_target(job, data_dir, url)
        return open_job(target.address, token=target.token)

    async def request(client: AnyClient, name: str) -> Operation:
        return await client.create_checkpoint(name, key=key, cause="asked by trireme table feed")

    try:
        await wait_for_operation(
            connect, await call_any_master(connect, request), max(AGAIN_S, limit_s), lambda _: None
        )
    except DeadlineExceeded:
        return True  # the next round takes it
    except (Conflict, NotFound, PeerError):
        return False
    except CallerError as error:
        say(f"no checkpoint now: {error.message}")
    return True


def write_next(spec: JobSpec, out: str, since: str | None, to: str | None) -> Done | None:
    """The next folder of a feed, from the checkpoint of its last one, or `since`; all rows if there is none,
    or it is gone. None: there is nothing newer. Raises NotFound, InvalidArgument, CheckpointUnusable,
    OSError."""
    from trainer_agent.tables import files as deltas  # noqa: PLC0415  loads torch

    before = [done for done, _ in deltas.complete(out)]
    last = before[-1] if before else None
    ref = choose(spec, to)
    manifest = stored.read_manifest(spec.storage, spec.job, ref)
    if not manifest.layout.tables:
        raise NotFound(f"job {spec.job} has no embedding tables")
    first = choose(spec, since) if since is not None else None
    begin = (first.uuid, first.step) if first else (last.checkpoint, last.step) if last else None
    if last is not None and begin is not None and begin[0] != last.checkpoint:
        msg = (
            f"the last folder of {out} is of step {last.step}, and this delta would begin at step {begin[1]}"
        )
        raise InvalidArgument(msg, hint="leave --since out to go on from there, or give another folder")
    if begin is not None and ref.step <= begin[1]:
        return None
    number = last.number + 1 if last else 1 if begin else 0
    folder = files.join(out, deltas.folder_name(number))
    found = [_changes(spec, ref, manifest, table, begin) for table in manifest.layout.tables]
    if any(each is None for each in found):
        if since is not None:
            raise NotFound(
                f"checkpoint {begin} is not there any more",
                hint="`trireme checkpoint list` shows those that are",
            )
        begin, found = None, [_changes(spec, ref, manifest, table, None) for table in manifest.layout.tables]
    tables = [each for each in found if each is not None]
    for each in tables:
        deltas.write_delta(each, folder)
    marker = deltas.Done(
        number=number,
        job=spec.job,
        checkpoint=ref.uuid,
        step=ref.step,
        since_checkpoint=begin[0] if begin else None,
        since=begin[1] if begin else None,
        rows={each.rows.spec.name: len(each.rows.ids) for each in tables},
        removed={each.rows.spec.name: len(each.removed) for each in tables},
    )
    files.write_bytes(files.join(folder, deltas.DONE), marker.to_bytes())
    return marker


def _changes(
    spec: JobSpec, ref: CheckpointRef, manifest: Manifest, table: TableSpec, since: tuple[str, int] | None
) -> TableDelta | None:
    """What changed in a table since a checkpoint: from the deltas of the newer one if they reach back so far,
    else from both. None: `since` is not there any more."""
    import numpy as np  # noqa: PLC0415

    from trainer_agent.tables.files import TableDelta, changed  # noqa: PLC0415
    from trainer_agent.tables.whole_tables import read_delta, read_table  # noqa: PLC0415  loads torch

    if since is None:
        return TableDelta(None, read_table(spec.storage, ref, manifest, table), np.empty(0, np.int64))
    if (found := read_delta(spec.storage, ref, manifest, table, since)) is not None:
        return found
    for older in stored.found(spec.storage)[0]:
        if older.uuid == since[0]:
            before = read_table(
                spec.storage, older, stored.read_manifest(spec.storage, spec.job, older), table
            )
            return changed(before, read_table(spec.storage, ref, manifest, table))
    return None


def _tell(written: Done, out: str) -> None:
    begin = "all rows" if written.since is None else f"from step {written.since}"
    rows = ", ".join(f"{name} {count} (-{written.removed[name]})" for name, count in written.rows.items())
    text = f"{written.number:08d}  step {written.step}, {begin}: {rows}  {out}"
    Console(soft_wrap=True).print(text, highlight=False)
