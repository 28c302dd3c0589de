"""`--init-from JOB[@STEP]` as the file that it means.

JOB             export/model.safetensors of that job; if it has not ended, its newest checkpoint
JOB@STEP        that checkpoint, exported once to the job's export-<uuid>/: checkpoints hold blocks without
                names rows of embedding tables lie beside it, in tables/; if the job's export lacks one (it is
                too large), its newest checkpoint is taken
with --init-optimizer    export-<uuid>/training.pt of that checkpoint, of the newest one for JOB
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trireme.cli.checkpoint import choose, spec_of
from trireme.settings import Setting
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.start_tables import names_beside
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import CheckpointUnusable, InvalidArgument, NotFound
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.job_choices import INITIAL_FILES, TRAINING_FILE, allowed_name

EXPORT_S = 600.0


def with_start_file(
    settings: Mapping[str, Setting], data_dir: Path | None, url: str | None = None
) -> dict[str, Setting]:
    """`settings` with the file for the name of a job in `init_from`. Raises NotFound, PeerError,
    InvalidArgument."""
    given = settings.get("init_from")
    if given is None or not _names_job(str(given.value)):
        return dict(settings)
    optimizer = settings.get("init_optimizer")
    file = _file_of(
        str(given.value), data_dir, url, optimizer=optimizer is not None and bool(optimizer.value)
    )
    return {**settings, "init_from": Setting(file, given.origin)}


def _names_job(text: str) -> bool:
    return "/" not in text and not text.endswith(INITIAL_FILES) and not Path(text).exists()


def _file_of(text: str, data_dir: Path | None, url: str | None, *, optimizer: bool) -> str:
    name, at, which = text.partition("@")
    job = allowed_name(name)
    try:
        spec = spec_of(job, data_dir, url)
    except NotFound as error:
        hint = (
            "--init-from takes the name of a job of this folder or cluster, or a file: a path with / "
            f"or a name with {', '.join(INITIAL_FILES)}"
        )
        raise NotFound(error.message, hint=hint) from error
    ended = files.join(spec.storage, "export", "model.safetensors")
    if at or optimizer or not files.exists(ended):
        ref, tables = _checkpoint(spec, which or None)
    else:
        try:
            ref, tables = _checkpoint(spec, None)
        except (NotFound, CheckpointUnusable):
            return files.absolute(ended)  # what is there is all that there is
        if tables <= names_beside(ended):
            return files.absolute(ended)
    folder = files.join(spec.storage, f"export-{ref.uuid}" + ("-state" if optimizer else ""))
    file = files.join(folder, TRAINING_FILE if optimizer else "model.safetensors")
    if not files.exists(file) or not tables <= names_beside(file):
        _export(job, ref.uuid, folder, data_dir, url, optimizer=optimizer)
    return files.absolute(file)


def _checkpoint(spec: JobSpec, which: str | None) -> tuple[CheckpointRef, set[str]]:
    """As `choose`, with the names of its embedding tables. Raises NotFound, CheckpointUnusable, OSError."""
    ref = choose(spec, which)
    return ref, {table.name for table in stored.read_manifest(spec.storage, spec.job, ref).layout.tables}


def _export(
    job: str, uuid: str, folder: str, data_dir: Path | None, url: str | None, *, optimizer: bool
) -> None:
    """In a process of its own: it imports that job's script."""
    command = [sys.executable, "-m", "trireme", "export", uuid, "--job", job, "--out", folder]
    command += ["--optimizer"] if optimizer else []
    command += ["--data-dir", str(data_dir)] if data_dir is not None and url is None else []
    command += ["--url", url] if url is not None else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise InvalidArgument(
            f"exporting checkpoint {uuid} of job {job} took more than {EXPORT_S:g} s"
        ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidArgument(f"checkpoint {uuid} of job {job} cannot be exported: {said}")
