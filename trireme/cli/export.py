"""`trireme export`: a checkpoint's model as files that plain PyTorch loads. The job need not run."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trireme.cli import exit_codes
from trireme.cli.checkpoint import Answer, answer, choose, spec_of
from trireme.cli.targets import Target, cluster_of
from trireme.view.job_address import client_of
from trireme_shared.checkpoints import stored
from trireme_shared.platform.storage import files
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.cluster import stored_source
from trireme_shared.protocol.records.job_choices import TRAINING_FILE

if TYPE_CHECKING:
    from trainer_agent.tables.files import StoredTable  # loads torch


def export(
    job: str | None,
    data_dir: Path | None,
    which: str | None,
    out: Path | str | None,
    url: str | None = None,
    *,
    optimizer: bool = False,
    tables: str = "safetensors",
    as_json: bool,
) -> int:
    """`tables`: see write_checkpoint_tables. Returns the exit code."""

    def work() -> Answer:
        spec, cluster = spec_of(job, data_dir, url), cluster_of(job, data_dir, url)
        with tempfile.TemporaryDirectory(prefix="trireme-export-") as folder:
            if cluster is not None and stored_source(spec.script):
                spec = spec.with_fields(script=str(asyncio.run(_fetch(cluster, Path(folder), spec.job))))
            return _export(spec, which, out, optimizer=optimizer, tables=tables, as_json=as_json)

    return answer(work, as_json=as_json)


async def _fetch(cluster: Target, folder: Path, job: str) -> Path:
    """The script that was sent with the job, and its modules, as files."""
    async with client_of(cluster.address, cluster.token) as client:
        found = await client.get_job_source(job)
    for name, text in {**found.modules, found.file_name: found.text}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / found.file_name


def _export(
    spec: JobSpec, which: str | None, out: Path | str | None, *, optimizer: bool, tables: str, as_json: bool
) -> Answer:
    ref = choose(spec, which)
    manifest = stored.read_manifest(spec.storage, spec.job, ref)
    folder = str(out) if out else files.join(spec.storage, f"export-step-{ref.step}")
    exports = asyncio.run(_write_model(spec, ref, manifest, folder, optimizer=optimizer))
    exports |= write_checkpoint_tables(spec.storage, ref, manifest, folder, tables, state=optimizer)
    if not as_json:
        Console(soft_wrap=True).print(f"checkpoint  step {ref.step}, {ref.uuid}", highlight=False)
        for kind, path in exports.items():
            Console(soft_wrap=True).print(f"{kind}  {path}", highlight=False)
    return {"job": spec.job, "checkpoint": ref.uuid, "step": ref.step, "exports": exports}, exit_codes.OK


async def _write_model(
    spec: JobSpec, ref: CheckpointRef, manifest: Manifest, directory: str, *, optimizer: bool
) -> dict[str, str]:
    """The user's model with the checkpoint's values, written as the end of training writes it: the script
    builds the model, so shared parameters and what is not trained come out as well. Raises LayoutMismatch if
    the script changed."""
    from trainer_agent.membership.lease import check_layout  # noqa: PLC0415  loads torch
    from trainer_agent.model.block_states import BlockStates, write_training  # noqa: PLC0415
    from trainer_agent.model.torch_compute import TorchCompute  # noqa: PLC0415
    from trainer_agent.script.user_module import load  # noqa: PLC0415

    with ThreadPoolExecutor(1) as executor:
        on_cpu = spec.with_fields(device="cpu")
        compute = TorchCompute(load(spec.script), on_cpu, executor, initial=manifest.layout.initial)
        check_layout(compute.layout, manifest.layout)
        states = BlockStates(compute.plan, compute.model, compute.optimizer) if optimizer else None
        stored.read_values(spec.storage, ref, manifest, compute.staging, states)
        compute.swap()
        exports = await compute.export(directory)
        if states is not None:
            lane_zero, url = manifest.record.lane_zero, files.join(directory, TRAINING_FILE)
            if lane_zero is not None:
                compute.restore(lane_zero)
            states.give_back()
            exports["training"] = write_training(url, compute.model, compute.optimizer, lane_zero)
        compute.close()
        return exports


def write_checkpoint_tables(
    storage_url: str,
    ref: CheckpointRef,
    manifest: Manifest,
    directory: str,
    form: str,
    *,
    state: bool = False,
) -> dict[str, str]:
    """Write the tables of a checkpoint into `tables/` in `directory`; returns kind -> URL of each file. One
    table at a time: its ids and values are in memory up to three times, and all parts are read for each.
    Raises CheckpointUnusable, OSError.

    `form`: safetensors (with `state` that of the optimizer, too), npy, parquet or none."""
    from trainer_agent.tables.files import write_tables  # noqa: PLC0415
    from trainer_agent.tables.whole_tables import read_table  # noqa: PLC0415  loads torch

    urls: dict[str, str] = {}
    for spec in manifest.layout.tables if form != "none" else ():
        table = read_table(storage_url, ref, manifest, spec, state=state and form == "safetensors")
        match form:
            case "npy":
                urls |= _write_npy(table, directory)
            case "parquet":
                urls |= _write_parquet(table, directory)
            case _:
                urls |= write_tables([table], directory)
    return urls


def _write_npy(table: StoredTable, directory: str) -> dict[str, str]:
    import numpy as np  # noqa: PLC0415

    urls = {}
    for what, array in (("ids", table.ids), ("values", table.values)):
        url = urls[f"table {table.spec.name} {what}"] = files.join(
            directory, "tables", f"{table.spec.name}.{what}.npy"
        )
        with files.write_atomic(url) as file:
            np.save(file, array)
    return urls


def _write_parquet(table: StoredTable, directory: str) -> dict[str, str]:
    """Columns `id` and `values`, a list of `dim` numbers."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    url = files.join(directory, "tables", f"{table.spec.name}.parquet")
    values = pa.FixedSizeListArray.from_arrays(pa.array(table.values.reshape(-1)), table.spec.dim)
    with files.write_atomic(url) as file:
        parquet.write_table(pa.table({"id": pa.array(table.ids), "values": values}), file)
    return {f"table {table.spec.name}": url}
