"""Which job or cluster a command means, and the token for it: --url or TRIREME_URL, else what runs in the
data folder.

a cluster (`trireme up`) or a run (`trireme run`): the job that is named and runs, else whichever of them
started last
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trireme.client.exchange import given_token
from trireme.launch import resume, run_folder
from trireme.pool import cluster_folder
from trireme.view.job_address import address_of
from trireme_shared.platform.security.tokens import admin_token
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound, PeerError
from trireme_shared.protocol.records.job_choices import name_problem

OPTIONS = "--data-dir or --url"


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask. `in_cluster`: it is a local cluster, or a job of it."""

    address: str
    token: str = ""
    in_cluster: bool = False


def job_target(job: str | None, data_dir: Path | None, url: str | None) -> Target:
    """Raises NotFound; Conflict if the job's run has ended, PeerError if it was stopped."""
    return cluster_of(job, data_dir, url) or _run_target(job, data_dir)


def target_in_cluster(job: str | None, data_dir: Path | None) -> Target | None:
    """A job of the cluster that runs in the data folder; None: none does, or a run beside it is meant. Raises
    InvalidArgument."""
    cluster = cluster_folder.find(data_dir)
    if cluster is None or not is_of_cluster(job, data_dir):
        return None
    return Target(
        address_of(cluster.url, checked_name(job) if job else None), given_token() or cluster.token, True
    )


def cluster_of(job: str | None, data_dir: Path | None, url: str | None) -> Target | None:
    """The job of a cluster that is meant, or the only job of a master that is named; None: a run in the data
    folder. Raises InvalidArgument."""
    if given := url or os.environ.get("TRIREME_URL"):
        return Target(address_of(given, checked_name(job) if job else None), given_token())
    return target_in_cluster(job, data_dir)


def cluster_target(data_dir: Path | None, url: str | None) -> Target:
    """A cluster's leader. Raises NotFound: none runs here; PeerError: it has no leader yet."""
    if given := url or os.environ.get("TRIREME_URL"):
        return Target(given, given_token())
    cluster = cluster_folder.must_find(data_dir)
    return Target(cluster.url, given_token() or cluster.token, True)


def local_run(job: str | None, data_dir: Path | None, url: str | None) -> Path | None:
    """The folder of the run that is meant; None: a job elsewhere or of a cluster. Raises NotFound."""
    if url or os.environ.get("TRIREME_URL"):
        return None
    if cluster_folder.find(data_dir) is not None and is_of_cluster(job, data_dir):
        return None
    return run_folder.find_run(data_dir, job, OPTIONS)[0]


def checked_name(job: str) -> str:
    """Raises InvalidArgument: no job can have this name."""
    if problem := name_problem(job):
        hint = f"{problem}; `trireme jobs` lists those of a cluster"
        raise InvalidArgument(f"{job[:80]!r} is no name of a job", hint=hint)
    return job


def is_of_cluster(job: str | None, data_dir: Path | None) -> bool:
    """A cluster runs there: whether the command means it, and no run beside it."""
    try:
        folder, _ = run_folder.find_run(data_dir, job)
    except NotFound:
        return True
    if job is not None:
        return not run_folder.is_running(folder)
    return cluster_folder.started_at(data_dir) > (folder / run_folder.RUN_FILE).stat().st_mtime


def token_of_run(folder: Path) -> str:
    """What commands on this machine show to the members of a run."""
    return given_token() or admin_token(folder)


def _run_target(job: str | None, data_dir: Path | None) -> Target:
    folder, facts = run_folder.find_run(data_dir, job, OPTIONS)
    if result := run_folder.read_json(folder / resume.RESULT_FILE):
        msg = f"job {result['job']} is {result['phase']}: nobody runs that could do this"
        raise Conflict(msg, hint="`trireme checkpoint list` and `trireme export` work for jobs that ended")
    if not run_folder.is_running(folder):
        msg = f"job {facts['job']} does not run now, and it is unfinished"
        raise PeerError(
            msg,
            hint="the command that started it resumes it; `trireme checkpoint list` and `trireme export` "
            "work",
        )
    return Target(str(facts["url"]), token_of_run(folder))
