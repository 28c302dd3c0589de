"""`trireme checkpoint list | verify`: a job's checkpoints, read from its storage; the job need not run.
`trireme checkpoint create | restore`: asked of a running job's master; progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trireme.cli import exit_codes
from trireme.cli.queries import stdout_console
from trireme.cli.targets import Target, cluster_of, job_target
from trireme.launch import resume, run_folder
from trireme.launch.run_folder import DATA_DIR
from trireme.view.job_address import AnyClient, OpenJob, call_any_master, open_job, wait_for_operation
from trireme.view.progress import say
from trireme_shared.checkpoints import stored
from trireme_shared.platform.runtime import ids
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import CheckpointUnusable, NotFound, PeerError, TriremeError
from trireme_shared.protocol.evaluations import evaluation_of
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest, PartLink
from trireme_shared.protocol.records.job_choices import allowed_name
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.protocol.urls import HIDDEN, without_passwords

Answer = tuple[dict[str, Any], int]


def spec_of(job: str | None, data_dir: Path | None, url: str | None = None) -> JobSpec:
    """The spec of a local run, finished or not, or of a job of a cluster, whose files this machine must see.
    Raises NotFound, PeerError."""
    if (cluster := cluster_of(job, data_dir, url)) is not None:
        return asyncio.run(_spec_in(cluster))
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)
    job = allowed_name(job) if job else None
    facts = run_folder.read_run_file(place, job)
    name = job or (str(facts["job"]) if facts else "")
    try:
        return JobSpec.from_bytes((place / name / "spec.json").read_bytes())
    except OSError as error:
        msg = f"{place} holds no run{f' of job {job}' if job else ''}"
        raise NotFound(msg, hint="give the same --job and --data-dir as to `trireme run`") from error


async def _spec_in(cluster: Target) -> JobSpec:
    async with open_job(cluster.address, token=cluster.token) as (client, job):
        found = await client.get_job(job)
    place = {"job": found.job, "script": found.script, "storage": found.storage, "sources": found.sources}
    spec = JobSpec(**dict(found.settings or ()), **place)
    check_seen(spec)
    return spec


def check_seen(spec: JobSpec) -> None:
    """Raises NotFound if this machine does not see the job's files, or is not told where they are."""
    if f"{HIDDEN}@" in spec.storage or f"={HIDDEN}" in spec.storage:
        msg = (
            f"the storage of job {spec.job} is {spec.storage}, with a password that the master does not show"
        )
        hint = (
            "run jobs with a storage whose credentials come from variables or files of its own, as AWS_* do"
        )
        raise NotFound(msg, hint=hint)
    folder = files.local_path(spec.storage)
    if folder is not None and not folder.is_dir():
        msg = f"this machine has no folder {folder}, where the files of job {spec.job} lie"
        hint = "run the command on a host of the cluster that sees it, if the job has written anything yet"
        raise NotFound(msg, hint=f"{hint}; `trireme up --storage` with a URL or a shared folder serves all")


def list_checkpoints(job: str | None, data_dir: Path | None, url: str | None = None, *, as_json: bool) -> int:
    return answer(lambda: _list(spec_of(job, data_dir, url), as_json=as_json), as_json=as_json)


def verify(
    job: str | None, data_dir: Path | None, which: str | None, url: str | None = None, *, as_json: bool
) -> int:
    """All checkpoints, or one; exit code 1 if any is damaged."""
    return answer(lambda: _verify(spec_of(job, data_dir, url), which, as_json=as_json), as_json=as_json)


def answer(work: Callable[[], Answer], *, as_json: bool) -> int:
    try:
        document, code = work()
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except OSError as error:
        return exit_codes.report_error(
            PeerError(f"the job's storage cannot be read: {error}"), as_json=as_json
        )
    if as_json:
        print(without_passwords(json.dumps(document)))  # noqa: T201
    return code


def _list(spec: JobSpec, *, as_json: bool) -> Answer:
    rows, best = [], _best_of(spec)
    there, unreadable = stored.manifests(spec.storage)
    for ref, manifest, damage in there:
        row: dict[str, Any] = {"checkpoint": ref.uuid, "step": ref.step, "timeline": ref.timeline}
        where = f"{stored.folder(spec.storage, ref.uuid)}/{ref.manifest}"
        if damage := damage or stored.misplaced(manifest, spec.job, ref, where):
            rows.append({**row, "damage": damage})
            continue
        number = manifest.evaluation or evaluation_of(manifest.record, spec.evaluate_every, spec.epochs)
        is_best = ref.uuid == best["checkpoint"] if best.get("checkpoint") else ref.step == best.get("step")
        rows.append({**row, **_facts(manifest), "evaluation": number, "best": is_best})
    if not as_json:
        facts, steps = ("step", "epoch", "timeline", "pservers"), {ref.uuid: ref.step for ref, _, _ in there}
        columns = (*facts, "kind", "MiB", "needs MiB", "written", "checkpoint", "evaluation")
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            own, needed = (
                f"{row[size] / (1 << 20):.1f}" if size in row else "" for size in ("bytes", "needed_bytes")
            )
            when = str(row.get("timestamp", ""))[:19]
            cells = (
                *(row.get(name, "") for name in facts),
                _kind(row, steps),
                own or row["damage"],
                needed,
                when,
            )
            evaluated = f"{row.get('evaluation') or ''}{' (best)' if row.get('best') else ''}"
            table.add_row(*map(str, cells), row["checkpoint"][:8], evaluated)
        stdout_console().print(table)
        for url in unreadable:
            Console(soft_wrap=True).print(f"not readable: {url}", highlight=False)
    document = {"job": spec.job, "storage": spec.storage, "checkpoints": rows, "unreadable": unreadable}
    return document, exit_codes.OK


def _kind(row: Mapping[str, Any], steps: Mapping[str, int]) -> str:
    """`steps`: of checkpoints by uuid."""
    if row.get("kind") != "delta":
        return str(row.get("kind", ""))
    in_order = sorted(row["bases"], key=lambda uuid: steps.get(uuid, -1))
    bases = ", ".join(str(steps.get(uuid, uuid[:8])) for uuid in in_order)
    return f"delta {row['deltas']} of {bases}"


def _best_of(spec: JobSpec) -> dict[str, Any]:
    """The best evaluation (keep_best) of a local run that has ended. Without `checkpoint`: it is that after
    training."""
    folder = files.local_path(spec.storage)
    result = run_folder.read_json(folder / resume.RESULT_FILE) if folder is not None else None
    best = (result or {}).get("best")
    return best if isinstance(best, dict) else {}


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "epoch": max((position.epoch for position in manifest.record.positions), default=0),
        "pservers": len(manifest.parts),
        "kind": "delta" if manifest.on else "base",
        "deltas": manifest.deltas,
        "bases": list(manifest.bases),
        "bytes": sum(part.bytes for part in manifest.parts),
        "needed_bytes": sum(manifest.files.values()),
        "timestamp": manifest.timestamp,
    }


def _verify(spec: JobSpec, which: str | None, *, as_json: bool) -> Answer:
    refs, unreadable = ([choose(spec, which)], []) if which else stored.found(spec.storage)
    rows, code = [], exit_codes.JOB_FAILED if unreadable else exit_codes.OK
    good: set[PartLink] = set()
    for ref in refs:
        row: dict[str, Any] = {
            "checkpoint": ref.uuid,
            "step": ref.step,
            "timeline": ref.timeline,
            "damage": None,
        }
        try:
            manifest = stored.read_manifest(spec.storage, spec.job, ref)
            row["bytes"] = stored.verify_parts(spec.storage, ref, manifest, good)
        except (CheckpointUnusable, OSError) as error:
            row["damage"], code = str(error), exit_codes.JOB_FAILED
        rows.append(row)
        if not as_json:
            Console(soft_wrap=True).print(
                f"step {ref.step}  {ref.uuid}  {row['damage'] or 'good'}", highlight=False
            )
    for url in () if as_json else unreadable:
        Console(soft_wrap=True).print(f"{url}  is not a readable manifest", highlight=False)
    if not refs and not unreadable:
        raise NotFound(f"job {spec.job} has no checkpoints in {spec.storage}")
    return {"job": spec.job, "storage": spec.storage, "checkpoints": rows, "unreadable": unreadable}, code


def choose(spec: JobSpec, which: str | None) -> CheckpointRef:
    """The checkpoint with that step, or whose uuid begins so; the newest one if `which` is None. Raises
    NotFound."""
    refs, _ = stored.found(spec.storage)
    matching = [ref for ref in refs if which is None or str(ref.step) == which]
    matching += [ref for ref in refs if which is not None and ref.uuid.startswith(which)]
    if not matching:
        known = ", ".join(f"step {ref.step}" for ref in refs) or "none"
        msg = f"job {spec.job} has no checkpoint {which or ''} in {spec.storage}; there are: {known}"
        raise NotFound(msg, hint="`trireme checkpoint list` shows them")
    return matching[0]


def create(job: str | None, data_dir: Path | None, url: str | None, wait_s: float, *, as_json: bool) -> int:
    """Returns the exit code."""
    key = ids.new_id("cli")

    async def request(client: AnyClient, name: str) -> Operation:
        return await client.create_checkpoint(name, key=key, cause="asked by trireme checkpoint create")

    return _run_operation(job, data_dir, url, request, wait_s, as_json=as_json)


def restore(
    job: str | None, data_dir: Path | None, url: str | None, which: str, wait_s: float, *, as_json: bool
) -> int:
    """`which`: a step, or the beginning of the uuid. Returns the exit code."""
    key = ids.new_id("cli")

    async def request(client: AnyClient, name: str) -> Operation:
        return await client.restore_checkpoint(name, await find_checkpoint(client, name, which), key=key)

    return _run_operation(job, data_dir, url, request, wait_s, as_json=as_json)


def _run_operation(
    job: str | None,
    data_dir: Path | None,
    url: str | None,
    request: Callable[[AnyClient, str], Awaitable[Operation]],
    wait_s: float,
    *,
    as_json: bool,
) -> int:
    def connect() -> AbstractAsyncContextManager[OpenJob]:
        """Connect to the master that leads now: the launcher writes a new leader's address into the run
        file."""
        target = job_target(job, data_dir, url)
        return open_job(target.address, token=target.token)

    async def run() -> Operation:
        operation = await call_any_master(connect, request)
        return await wait_for_operation(connect, operation, wait_s, say) if wait_s else operation

    try:
        operation = asyncio.run(run())
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(json.dumps(operation.model_dump(mode="json")))  # noqa: T201
    else:
        what = f"step {operation.step}  {operation.checkpoint_id}" if operation.checkpoint_id else ""
        Console(soft_wrap=True).print(f"{operation.state}  {what}  {operation.operation_id}", highlight=False)
    return exit_codes.OK


async def find_checkpoint(client: AnyClient, job: str, which: str) -> str:
    """The checkpoint's id. Raises NotFound, which lists the checkpoints that exist."""
    kept = [checkpoint async for checkpoint in client.list_checkpoints(job)]
    for checkpoint in kept:
        if which == str(checkpoint.step) or checkpoint.checkpoint_id.startswith(which):
            return checkpoint.checkpoint_id
    steps = ", ".join(f"step {checkpoint.step} ({checkpoint.checkpoint_id[:8]})" for checkpoint in kept)
    msg = f"the job has no checkpoint {which}; there are: {steps or 'none yet'}"
    raise NotFound(msg, hint="`trireme checkpoint list` shows them")
