"""`trireme checkpoint list | verify` and `trireme export`: a job's checkpoints, read from its storage; no job need run.

{storage}/checkpoints/*/manifest-*.json -> a table | every part read and its checksum compared | the model as files
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.checkpoints import stored
from shared.errors import CheckpointUnusable, NotFound, PeerError, TriremeError
from shared.records import JobSpec
from shared.records.checkpoints import CheckpointRef, Manifest
from shared.storage import files
from shared.storage.tensor_file import Entry
from trireme.cli import exit_codes
from trireme.launch import run_folder
from trireme.launch.run_folder import DATA_DIR

Answer = tuple[dict[str, Any], int]


def spec_of(job: str | None, data_dir: Path | None) -> JobSpec:
    """The spec of a local run, finished or not. Raises NotFound."""
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)
    facts = run_folder.read_run_file(place, job)
    name = job or (str(facts["job"]) if facts else "")
    try:
        return JobSpec.model_validate_json((place / name / "spec.json").read_bytes())
    except OSError as error:
        msg = f"there is no run of {f'job {job}' if job else 'any job'} in {place}"
        raise NotFound(msg, hint="give --job and --data-dir as `trireme run` had them") from error


def show(job: str | None, data_dir: Path | None, *, as_json: bool) -> int:
    return _answer(lambda: _show(spec_of(job, data_dir), as_json=as_json), as_json=as_json)


def verify(job: str | None, data_dir: Path | None, which: str | None, *, as_json: bool) -> int:
    """Of all checkpoints, or of one; exit code 1 if any is damaged."""
    return _answer(lambda: _verify(spec_of(job, data_dir), which, as_json=as_json), as_json=as_json)


def export(job: str | None, data_dir: Path | None, which: str | None, out: Path | None, *, as_json: bool) -> int:
    return _answer(lambda: _export(spec_of(job, data_dir), which, out, as_json=as_json), as_json=as_json)


def _answer(work: Callable[[], Answer], *, as_json: bool) -> int:
    try:
        document, code = work()
    except TriremeError as error:
        return exit_codes.tell(error, as_json=as_json)
    except OSError as error:
        return exit_codes.tell(PeerError(f"the job's storage cannot be read: {error}"), as_json=as_json)
    if as_json:
        print(json.dumps(document))  # noqa: T201
    return code


def _show(spec: JobSpec, *, as_json: bool) -> Answer:
    rows = []
    refs, unreadable = stored.found(spec.storage)
    for ref in refs:
        row: dict[str, Any] = {"checkpoint": ref.uuid, "step": ref.step, "timeline": ref.timeline}
        try:
            manifest = stored.read_manifest(spec.storage, spec.job, ref)
        except CheckpointUnusable as error:
            rows.append({**row, "damage": error.message})
            continue
        rows.append({**row, **_facts(manifest)})
    if not as_json:
        table = Table("step", "epoch", "timeline", "pservers", "MiB", "written", "checkpoint", box=None, pad_edge=False)
        for row in rows:
            size = f"{row['bytes'] / (1 << 20):.1f}" if "bytes" in row else row["damage"]
            when = str(row.get("timestamp", ""))[:19]
            cells = (row["step"], row.get("epoch", ""), row["timeline"], row.get("pservers", ""), size, when)
            table.add_row(*map(str, cells), row["checkpoint"][:8])
        Console().print(table)
        for url in unreadable:
            Console(soft_wrap=True).print(f"not readable: {url}", highlight=False)
    document = {"job": spec.job, "storage": spec.storage, "checkpoints": rows, "unreadable": unreadable}
    return document, exit_codes.OK


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "epoch": max((position.epoch for position in manifest.record.positions), default=0),
        "pservers": len(manifest.parts),
        "bytes": sum(part.bytes for part in manifest.parts),
        "timestamp": manifest.timestamp,
    }


def _verify(spec: JobSpec, which: str | None, *, as_json: bool) -> Answer:
    refs, unreadable = ([_choose(spec, which)], []) if which else stored.found(spec.storage)
    rows, code = [], exit_codes.JOB_FAILED if unreadable else exit_codes.OK
    for ref in refs:
        row: dict[str, Any] = {"checkpoint": ref.uuid, "step": ref.step, "timeline": ref.timeline, "damage": None}
        try:
            manifest = stored.read_manifest(spec.storage, spec.job, ref)
            row["bytes"] = stored.verify_parts(spec.storage, ref, manifest)
        except (CheckpointUnusable, OSError) as error:
            row["damage"], code = str(error), exit_codes.JOB_FAILED
        rows.append(row)
        if not as_json:
            Console(soft_wrap=True).print(f"step {ref.step}  {ref.uuid}  {row['damage'] or 'good'}", highlight=False)
    for url in () if as_json else unreadable:
        Console(soft_wrap=True).print(f"{url}  is no manifest (any more)", highlight=False)
    if not refs and not unreadable:
        raise NotFound(f"job {spec.job} has no checkpoints in {spec.storage}")
    return {"job": spec.job, "storage": spec.storage, "checkpoints": rows, "unreadable": unreadable}, code


def _choose(spec: JobSpec, which: str | None) -> CheckpointRef:
    """By step or the beginning of its uuid; without either the newest. Raises NotFound."""
    refs, _ = stored.found(spec.storage)
    fitting = [ref for ref in refs if which is None or str(ref.step) == which or ref.uuid.startswith(which)]
    if not fitting:
        there = ", ".join(f"step {ref.step}" for ref in refs) or "none"
        msg = f"job {spec.job} has no checkpoint {which or ''} in {spec.storage}; there are: {there}"
        raise NotFound(msg, hint="`trireme checkpoint list` shows them")
    return fitting[0]


def _export(spec: JobSpec, which: str | None, out: Path | None, *, as_json: bool) -> Answer:
    ref = _choose(spec, which)
    manifest = stored.read_manifest(spec.storage, spec.job, ref)
    exports = asyncio.run(
        _write_model(spec, ref, manifest, str(out or files.join(spec.storage, f"export-step-{ref.step}")))
    )
    if not as_json:
        Console(soft_wrap=True).print(f"checkpoint  step {ref.step}, {ref.uuid}", highlight=False)
        for kind, path in exports.items():
            Console(soft_wrap=True).print(f"{kind}  {path}", highlight=False)
    return {"job": spec.job, "checkpoint": ref.uuid, "step": ref.step, "exports": exports}, exit_codes.OK


async def _write_model(spec: JobSpec, ref: CheckpointRef, manifest: Manifest, directory: str) -> dict[str, str]:
    """The user's model with the checkpoint's values, written as the end of training writes it: the script builds the
    model, so shared parameters and what is not trained come out as well. Raises LayoutMismatch if the script changed."""
    from trainer_agent.membership.initialise import check_layout  # noqa: PLC0415  loads torch
    from trainer_agent.model.torch_compute import TorchCompute  # noqa: PLC0415
    from trainer_agent.script.user_module import load  # noqa: PLC0415

    with ThreadPoolExecutor(1) as executor:
        compute = TorchCompute(load(spec.script), spec.model_copy(update={"device": "cpu"}), executor)
        check_layout(compute.layout, manifest.layout)
        missing = {block.number for block in manifest.layout.blocks()}

        def place(entry: Entry) -> memoryview | None:
            _, number, state = [*entry.name.split(".", 2), "", ""][:3]
            if state or not number.isdecimal() or int(number) not in missing:
                return None
            missing.remove(int(number))
            return compute.staging(int(number))

        for part in manifest.parts:
            stored.read_part(spec.storage, ref, part, place)
        if missing:
            msg = f"checkpoint {ref.uuid} (step {ref.step}) lacks {len(missing)} blocks, the first is {min(missing)}"
            raise CheckpointUnusable(msg)
        compute.swap()
        return await compute.export(directory)
