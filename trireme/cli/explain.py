"""`trireme explain`: why a job does not progress and what to do.

the run's files: it ended, was stopped ─► told from them
the job's master ─► explainJob │ does not answer ─► etcd: who leads? ─► that one, or why nobody does
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.cli import exit_codes
from trireme.cli.targets import Target, checked_name, target_in_cluster, token_of_run
from trireme.client.exchange import MASTERLESS, given_token
from trireme.launch import resume, run_folder
from trireme.view.child_events import ENDS, read_events
from trireme.view.job_address import address_of, open_job
from trireme.view.report import epochs_of, without_tokens
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Etcd, Get
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import CallerError, NotFound, PeerError, TriremeError, Unauthorized
from trireme_shared.protocol.explanations import Cause, Code, Explanation, explanation_of
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, MasterAddress, MasterLock, Phase
from trireme_shared.protocol.records.checkpoints import saved_point

ANSWER_S = 3.0
MASTER_S = 8.0  # a masterless job is watched for some seconds
TOLD = 3  # deaths of processes


def explain(job: str | None, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code: 0 whatever the cause is, if it could be told."""
    telemetry.configure(level="ERROR", json=False)
    try:
        told = asyncio.run(_explained(job, data_dir, url or os.environ.get("TRIREME_URL", "")))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    print(told.model_dump_json() if as_json else text_of(told))  # noqa: T201
    return exit_codes.OK


async def _explained(job: str | None, data_dir: Path | None, url: str) -> Explanation:
    """Raises NotFound without such a job, Unauthorized."""
    if url:
        return await _by_address(
            job or "", Target(address_of(url, checked_name(job) if job else None), given_token())
        )
    if "TRIREME_ETCD" in os.environ and job:
        return await _by_etcd(MemberSettings(job=job).etcd_access, job, "", None)
    if (target := target_in_cluster(job, data_dir)) is not None:
        return await _by_address(job or "", target)
    folder, facts = run_folder.find_begun_run(data_dir, job, "--data-dir or --url")
    if result := run_folder.read_json(folder / resume.RESULT_FILE):
        return explain_ended(result)
    if not run_folder.is_running(folder):
        return explain_stopped(folder)
    name, address = folder.name, str((facts or {}).get("url", ""))
    if facts is None:
        return explanation_of(name, _no_master(name, None, folder, "no master of this run has led yet"))
    try:
        return await _asked(Target(address, token_of_run(folder)))
    except (PeerError, CallerError) as error:
        if isinstance(error, Unauthorized):
            raise
        return await _by_etcd(EtcdAccess.from_facts(facts), name, address, folder, error)


async def _by_address(job: str, target: Target) -> Explanation:
    try:
        return await _asked(target)
    except PeerError as error:
        return explanation_of(job or target.address, _silent_master(target.address, error, None))


async def _asked(target: Target) -> Explanation:
    """What the master there explains. Raises PeerError, Unauthorized."""
    async with open_job(target.address, token=target.token, timeout_s=MASTER_S) as (client, job):
        return await client.explain_job(job)


async def _by_etcd(
    access: EtcdAccess, job: str, asked: str, folder: Path | None, error: TriremeError | None = None
) -> Explanation:
    """The master at `asked` did not explain the job (`error`): ask the one that etcd names, or tell why there
    is none."""
    etcd = access.connect()
    try:
        leader, state, known = await _leader(etcd, Keys(job))
    except CallerError as refused:
        raise Unauthorized(f"etcd at {access} refused: {refused.message}") from refused
    except PeerError as silent:
        return explanation_of(job, _no_etcd(access, silent, folder))
    finally:
        await etcd.close()
    if not known:
        raise NotFound(f"etcd at {access} holds no job {job}", hint="trireme explain JOB --url URL")
    if asked.startswith(MASTERLESS):
        return explanation_of(job, _no_sweeper(job, state, leader, str(error)))
    if leader and leader != asked:
        try:
            return await _asked(
                Target(address_of(leader, job), token_of_run(folder) if folder else given_token())
            )
        except PeerError as failed:
            error = failed
    if leader and error is not None:
        return explanation_of(job, _silent_master(leader, error, folder))
    return explanation_of(
        job, _no_master(job, state, folder, str(error) if error else "no master's key is in etcd")
    )


async def _leader(etcd: Etcd, keys: Keys) -> tuple[str, JobState | None, bool]:
    """The leading master's url (of a masterless job the sweeper's, "" if nobody leads), the job's state,
    whether etcd knows it."""
    reads = [
        Get(keys.master_address),
        Get(keys.sweep_lock),
        Get(keys.state),
        Get(keys.prefix, prefix=True, limit=1),
    ]
    found = await etcd.txn([], reads, timeout_s=ANSWER_S)
    values = [kv.value if (kv := found.range(place).first) else None for place in range(3)]
    address = read_record(MasterAddress, keys.master_address, values[0])
    sweeper = read_record(MasterLock, keys.sweep_lock, values[1])
    url = address.url if address else sweeper.url if sweeper else ""
    return url, read_record(JobState, keys.state, values[2]), found.range(3).first is not None


def _no_etcd(access: EtcdAccess, error: PeerError, folder: Path | None) -> Cause:
    return Cause(
        code=Code.ETCD_UNREACHABLE,
        summary=f"etcd at {access} does not answer, so nobody can lead the job.",
        details=(error.message, *told_by_launcher(folder, "etcd")),
        hints=(
            "start etcd again, or make it reachable: members take their places again by themselves",
            "trireme doctor",
        ),
    )


def _no_master(job: str, state: JobState | None, folder: Path | None, why: str) -> Cause:
    details = [f"The last known answer: {why}."]
    if state is not None:
        details.append(f"The job's state in etcd: {state.phase} ({state.reason or 'no reason given'}).")
        if state.phase is Phase.RUNNING:
            details.append("Trainers go on with the tasks they have, and wait when they need new ones.")
    return Cause(
        code=Code.NO_MASTER,
        summary=f"No master leads job {job}: nobody gives out tasks.",
        details=(*details, *told_by_launcher(folder, "master")),
        hints=(
            f"TRIREME_JOB={job} TRIREME_ETCD=URL python -m master_service",
            "read logs/master-*.log of the run",
        ),
    )


def _no_sweeper(job: str, state: JobState | None, sweeper: str, why: str) -> Cause:
    """The cause if a job without a master cannot be read from etcd."""
    who = f"the trainer at {sweeper} sweeps" if sweeper else "no trainer sweeps"
    return Cause(
        code=Code.NO_MASTER,
        summary=f"Job {job} has no master, {who}, and its task queue cannot be read.",
        details=(
            why,
            f"The job's state in etcd: {f'{state.phase} ({state.reason})' if state else 'none yet'}.",
        ),
        hints=(
            f"TRIREME_JOB={job} TRIREME_ETCD=URL python -m trireme.masterless",
            "read logs/trainer-*.log of the run",
        ),
    )


def _silent_master(url: str, error: TriremeError, folder: Path | None) -> Cause:
    return Cause(
        code=Code.MASTER_SILENT,
        summary=f"The master at {url} does not answer.",
        details=(error.message, *told_by_launcher(folder, "master")),
        hints=(
            "wait: when its lease runs out, a standby or its restart takes over",
            "read logs/master-*.log of the run",
            "is the address right? see run.json in the job's folder, or TRIREME_URL",
        ),
    )


def text_of(told: Explanation) -> str:
    """One paragraph for a cause, then what to do."""
    lines = [f"job {told.job}: {told.code}", *_paragraph(told)]
    for cause in told.also:
        lines += ["", f"also: {cause.code}", *_paragraph(cause)]
    return without_tokens("\n".join(lines))


def _paragraph(cause: Cause) -> list[str]:
    details = (f"  {line}" for detail in cause.details for line in detail.splitlines())
    return [cause.summary, *details, *(f"  -> {hint}" for hint in cause.hints)]


def explain_ended(result: Mapping[str, Any]) -> Explanation:
    """`result`: the document that the run has left."""
    job, option = str(result["job"]), f"--job {result['job']}"
    if result["phase"] == Phase.COMPLETED:
        models = [f"The model ({kind}) is {path}." for kind, path in result["exports"].items()]
        cause = Cause(
            code=Code.JOB_COMPLETED,
            summary=f"Job {job} is completed: nothing is left to do.",
            details=(f"{result['records']:,} records were trained in {epochs_of(result)}.", *models),
            hints=(f"trireme status {option}", "trireme run SCRIPT --fresh trains it again"),
        )
        return explanation_of(job, cause)
    failure, details = result.get("failure"), [f"The cause is {result.get('cause') or 'not recorded'}."]
    if failure:
        where = f" in {failure['task']}" if failure.get("task") else ""
        details.append(f"The error{where}: {failure['error_type']}: {failure['message']}")
        details += [failure["traceback"].rstrip()] if failure.get("traceback") else []
    if (discarded := result["discarded"])["tasks"]:
        details.append(f"{discarded['tasks']} tasks with {discarded['records']:,} records were left out.")
    if result.get("resumable"):
        details.append("It is resumable: started again, it goes on from its newest checkpoint.")
    else:
        details.append("It is not resumable: started again, it starts from the beginning.")
    return explanation_of(
        job,
        Cause(
            code=Code.JOB_FAILED,
            summary=f"Job {job} has failed: {result['reason']}",
            details=tuple(details),
            hints=(
                "correct the cause, then trireme run SCRIPT (the same command)",
                f"read the logs in {result['logs']}",
            ),
        ),
    )


def explain_stopped(folder: Path) -> Explanation:
    """Nobody runs the job, and it is unfinished."""
    script, saved = "SCRIPT", "It is not known which checkpoints it has."
    try:
        spec = JobSpec.from_bytes((folder / "spec.json").read_bytes())
        script = shlex.quote(spec.script)
        refs, _ = stored.found(spec.storage)
    except (OSError, ValueError):
        pass
    else:
        newest = max(refs, key=lambda ref: (ref.timeline, ref.step), default=None)
        saved = (
            f"Its newest checkpoint is of {saved_point(spec.mode, newest.step)}: it goes on from there."
            if newest
            else f"It has no checkpoint in {spec.storage} yet: it begins with its first step."
        )
    return explanation_of(
        folder.name,
        Cause(
            code=Code.JOB_STOPPED,
            summary=f"Job {folder.name} was stopped before its end: its launcher does not run.",
            details=(saved, *told_by_launcher(folder)),
            hints=(
                f"trireme run {script} (the same command as before) resumes it",
                f"trireme checkpoint list --job {folder.name}",
            ),
        ),
    )


def told_by_launcher(folder: Path | None, role: str = "") -> list[str]:
    """How the last processes of that role ended (all roles if it is empty); nothing for a job that no
    launcher runs here."""
    if folder is None:
        return []
    ends = [
        event
        for event in read_events(folder)
        if event["what"] in ENDS and str(event["child"]).startswith(role)
    ]
    return [
        f"{event['child']} ended at {event['time']}: {event['cause'] or 'cause unknown'}."
        for event in ends[-TOLD:]
    ]
