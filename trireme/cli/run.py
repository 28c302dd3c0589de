"""`trireme run`: settings -> inspection of the script -> state of an earlier run -> local cluster -> summary
and exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trireme import existing_etcd
from trireme.cli import exit_codes
from trireme.cli.history import logs
from trireme.cli.history.metrics import loss_chart
from trireme.cli.history.trackers import check_trackers, finish_trackers
from trireme.cli.start_file import with_start_file
from trireme.cli.tables.memory import memory_of_tables
from trireme.launch import resume, run_folder
from trireme.launch.cluster import LocalCluster, pservers_for
from trireme.launch.interrupt import InterruptHandler, resume_command
from trireme.launch.processes import ForkServer
from trireme.launch.resume import Facts
from trireme.launch.run_folder import told_if_full
from trireme.launch.supervision import HOST, ClusterSettings
from trireme.preflight import ScriptError, check_path, inspect
from trireme.script_source import digests_of
from trireme.settings import (
    FLAGS,
    SETTINGS,
    Setting,
    UsageError,
    check_fields,
    from_script,
    has_pservers,
    job_name,
    job_spec,
    merge,
    origins_of,
    outside_script,
)
from trireme.validation import AUTO, without_auto
from trireme.view.child_events import restarts_in
from trireme.view.live_progress import ProgressReporter, ScriptOutput
from trireme.view.progress import Display, display
from trireme.view.report import failure_text, result_document, summary_text
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime import clock, ids, output, telemetry
from trireme_shared.platform.runtime.limits import cores, memory_bytes
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.access import is_loopback
from trireme_shared.platform.security.tls import Tls
from trireme_shared.platform.security.tokens import TokenFolder
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.object_store import REQUEST_S, endpoint, is_s3
from trireme_shared.protocol.errors import PeerError, TriremeError, Unauthorized
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Dispatch, FailureCause, JobSpec, JobState, Phase, Strategy
from trireme_shared.protocol.records.job_choices import allowed_name
from trireme_shared.protocol.urls import without_passwords

REQUEST_TIMEOUT_S = 5.0
REPORT_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command line; flags that were not given are None. `spelling`: of flags, in messages about them.
    `again`: what resumes this run ("": the same command). `open_display`: what shows it, once everything was
    checked."""

    script: Path
    flags: Mapping[str, Any]
    assignments: tuple[str, ...] = ()
    check: bool = True
    dry_run: bool = False
    fresh: bool = False
    accept_changes: bool = False
    as_json: bool = False
    insecure: bool = False
    spelling: str = FLAGS
    again: str = ""
    open_display: Callable[[JobSpec, Path], Display] = lambda _spec, _folder: display()


def run_command(request: RunRequest) -> int:
    """Returns the exit code; prints all messages."""
    output.patient()
    telemetry.configure(level="ERROR", json=False)
    try:
        check_path(request.script)
        return asyncio.run(run_job(request))
    except ScriptError as error:
        return exit_codes.report_script_error(error.failure, as_json=request.as_json)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=request.as_json)
    except asyncio.CancelledError:
        return exit_codes.INTERRUPTED


async def run_job(request: RunRequest) -> int:
    """The exit code of a job that has ended. Raises ScriptError, TriremeError; CancelledError if it was
    interrupted."""
    interrupt = InterruptHandler()
    with interrupt, ForkServer() as forks:
        outer = outside_script(request.flags, request.assignments, request.spelling)
        check_fields(
            {name: setting for name, setting in outer.items() if not name.startswith("init_")}
        )  # first: importing torch takes seconds, and a wrong flag should be told at once
        common, spares = (
            common_settings(outer, insecure=request.insecure),
            number_in(outer, "spare_pservers", 16),
        )
        if not request.dry_run:
            if common.port:
                run_folder.check_port(common.host, common.port)
            if common.etcd is not None:
                await existing_etcd.check(common.etcd, Keys(job_named(outer, request.script, quietly=True)))
        data_dir = Path(str(outer["data_dir"].value)) if "data_dir" in outer else run_folder.DATA_DIR
        outer = await asyncio.to_thread(with_start_file, outer, data_dir)
        check_fields(outer)
        known = without_auto({name: setting.value for name, setting in outer.items() if name in SETTINGS})
        inspection = await inspect(
            request.script, known, check=request.check, start=forks.start, origins=origins_of(outer)
        )
        if inspection.notice:
            print(inspection.notice, file=sys.stderr)  # noqa: T201
        settings = merge([from_script(inspection.config)]) | outer
        counted = has_pservers(settings) and settings.get("pservers", Setting(AUTO, "default")).value == AUTO
        if counted:
            settings["pservers"] = Setting(pservers_for(inspection.model, cores()), "pservers = auto")
        job = job_named(settings, request.script)
        base = str(settings["storage"].value) if "storage" in settings else None
        spec = job_spec(
            settings | {"job": Setting(job, "--job")},
            script=str(request.script.absolute()),
            dataset=inspection.dataset,
            evaluation_dataset=inspection.evaluation_dataset,
            storage=storage_of(base, job, (data_dir / job).absolute()),
        )
        own_code = [
            *inspection.readers,
            *(each.kind.partition(":")[0] for each in spec.trackers if each.is_own),
        ]
        spec = spec.with_fields(sources=await asyncio.to_thread(digests_of, request.script, own_code))
        await check_trackers(spec)
        if spec.named_tasks:
            name = "pre_tasks" if spec.pre_tasks else "post_tasks"
            msg = (
                f"{settings[name].origin}: pre- and post-tasks run on members of a cluster, and "
                "trireme run has none"
            )
            raise UsageError(
                msg, hint="start a cluster with `trireme up` and give it the job with `trireme submit`"
            )
        if spec.min_members > spec.trainers:
            msg = (
                f"min_members is {spec.min_members} and trainers is {spec.trainers}: the job would "
                f"never begin; use at most {spec.trainers}"
            )
            raise UsageError(msg)
        if spec.strategy is Strategy.COLLECTIVE and spares:
            msg = (
                f"{outer['spare_pservers'].origin}: jobs with strategy collective have no parameter "
                "servers; leave it out"
            )
            raise UsageError(msg)
        if inspection.nccl is False:
            msg = (
                f"{settings['backend'].origin} is nccl, but this host, where the trainers run, has no "
                "GPU, or its torch has no NCCL"
            )
            raise UsageError(msg, hint="use backend gloo, or auto")
        if spec.dispatch is Dispatch.ETCD and (common.port or common.standbys):
            named = "port" if common.port else "standbys"
            msg = (
                f"{outer[named].origin} is a setting of masters, and with dispatch etcd there is no "
                "master; leave it out"
            )
            raise UsageError(msg)
        if request.dry_run:
            print(spec.model_dump_json(indent=2))  # noqa: T201
            return exit_codes.OK
        with run_folder.opened(data_dir, job) as folder, told_if_full(folder):
            previous, script = resume.read_previous_run(folder), resume.script_digest(request.script)
            last = storage_of(base, job, folder, previous.spec.storage if previous.spec else "")
            history = previous.spec.history if previous.spec else ()
            resumed = spec.with_fields(storage=last)
            if counted and previous.spec and previous.spec.pservers:
                resumed = resumed.with_fields(pservers=previous.spec.pservers)
            plan = resume.decide(
                previous,
                resumed,
                script,
                folder,
                fresh=request.fresh,
                accept=request.accept_changes,
                model=inspection.model,
            )
            resumed = resume.accepted_in(resumed, history, plan, clock.timestamp())
            if plan.sentence:
                print(plan.sentence, file=sys.stderr)  # noqa: T201
            if plan.start is resume.Start.DONE and previous.result is not None:
                await finish_trackers(resumed, previous.result)
                print(json.dumps(previous.result) if request.as_json else summary_text(previous.result))  # noqa: T201
                return exit_codes.OK
            spec = spec if plan.start is resume.Start.NEW else resumed
            if told := private_files.told_of_sockets():
                print(told, file=sys.stderr)  # noqa: T201
            for line in memory_of_tables(inspection.model, spec, memory_bytes()):
                print(line, file=sys.stderr)  # noqa: T201
            await check_storage(spec.storage, lambda sentence: print(sentence, file=sys.stderr))  # noqa: T201
            resumes = plan.start is resume.Start.RESUME
            if common.etcd is not None:
                wanted = existing_etcd.Claim(folder, previous.spec, resumes=resumes, fresh=request.fresh)
                await existing_etcd.claim(common.etcd, Keys(job), wanted)
            elif resumes:
                existing_etcd.check_same_kind(previous.etcd, folder, job)
            _prepare(folder, plan.start, script, inspection.model, common.etcd)
            common = replace(common, tokens=tokens_of(folder, insecure=request.insecure))
            accepted = inspection.model if plan.accepted else None
            make = partial(
                LocalCluster, spec, folder, common, spare_pservers=spares, forks=forks, accepted=accepted
            )
            return await _train(make, spec, folder, interrupt, request)


def _host_in(settings: Mapping[str, Setting], *, insecure: bool) -> str:
    """Where members listen. Raises UsageError if others reach it and no token shall protect it."""
    host = str(settings["host"].value) if "host" in settings else HOST
    if insecure and not is_loopback(host):
        msg = (
            f"{settings['host'].origin} = {host} lets other hosts reach all members, and --insecure "
            "protects nothing"
        )
        raise UsageError(
            msg, hint="leave --insecure out: members and commands then use tokens that are made for them"
        )
    return host


def tokens_of(folder: Path, *, insecure: bool) -> TokenFolder | None:
    """Of a run or a cluster, made if there are none; TRIREME_TOKEN is one of an admin. None: `insecure`.
    Raises InvalidArgument, also if the files for TLS cannot be used."""
    Tls.from_environment().check()
    if insecure:
        return None
    tokens = TokenFolder(folder)
    tokens.prepare(os.environ.get("TRIREME_TOKEN", ""))
    return tokens


def common_settings(settings: Mapping[str, Setting], *, insecure: bool) -> ClusterSettings:
    """What the command line says of the processes of a run or a cluster; tokens are made once its folder is
    known. Raises UsageError."""
    return ClusterSettings(
        etcd=existing_etcd.access_of(settings),
        host=_host_in(settings, insecure=insecure),
        advertise=str(settings["advertise"].value) if "advertise" in settings else "",
        port=number_in(settings, "port", 65535),
        standbys=number_in(settings, "standbys", 16),
    )


def job_named(settings: Mapping[str, Setting], script: Path, *, quietly: bool = False) -> str:
    """The name of the job; says so if it is not the one that was given."""
    given = settings.get("job", Setting(script.stem, "the script's name"))
    job = allowed_name(str(given.value)) if "job" in settings else job_name(script)
    if job != given.value and not quietly:
        what = f"the job is called {job}, not {given.value} ({given.origin})"
        print(f"{what}: a job's name has lower-case letters, digits and hyphens", file=sys.stderr)  # noqa: T201
    return job


def _prepare(
    folder: Path, start: resume.Start, script: str, model: Facts | None, access: EtcdAccess | None
) -> None:
    """Raises UsageError if files in the folder cannot be moved or written."""
    try:
        with told_if_full(folder):
            if start is resume.Start.NEW:
                resume.set_aside(folder)
                resume.write_start(folder, script, model)
            for name in (run_folder.RUN_FILE, resume.RESULT_FILE, logs.EVENTS_FILE):
                (folder / name).unlink(missing_ok=True)
            if access is not None:
                run_folder.write_json(folder / resume.ETCD_FILE, access.facts())
            private_files.make_folder(folder / "logs")
    except OSError as error:
        msg = f"the files of the last run in {folder} cannot be moved: {error}; choose another --data-dir"
        raise UsageError(msg) from error


def number_in(settings: Mapping[str, Setting], name: str, highest: int) -> int:
    setting = settings.get(name, Setting(0, name))
    try:
        value = int(setting.value)
    except (TypeError, ValueError):
        value = -1
    if not 0 <= value <= highest:
        msg = f"{setting.origin} = {setting.value!r}: give a whole number from 0 to {highest}"
        raise UsageError(msg)
    return value


async def _train(
    make: Callable[..., LocalCluster],
    spec: JobSpec,
    folder: Path,
    interrupt: InterruptHandler,
    request: RunRequest,
) -> int:
    """`make(on_event=...)` makes the cluster."""
    screen = request.open_display(spec, folder)
    spent = run_folder.TimeSpent(folder)
    output = ScriptOutput(folder / "logs", screen.output)
    try:
        reporter = ProgressReporter(spec, screen, restarts_in(folder))
        cluster = make(on_event=reporter.on_child)
        interrupt.cluster, interrupt.say = cluster, screen.event
        async with cluster:
            interrupt.ready = True
            cluster.run_beside(spent.keep, "noting the time that the run has taken")
            cluster.run_beside(output.run, "showing what the script prints")
            try:
                state = await _run_to_the_end(cluster, reporter, folder, screen)
            except Exception:
                await interrupt.save_before_giving_up(cluster)
                raise
            counts = await reporter.last_counts(lambda: cluster.client(REQUEST_TIMEOUT_S))
            events = await logs.all_events(lambda: cluster.client(REQUEST_TIMEOUT_S))
            resumable = state.cause not in (None, FailureCause.SCRIPT) and await _is_saved(cluster)
    except asyncio.CancelledError:
        output.look(clock.monotonic(), last=True)  # the hint shall be the last line
        screen.event(f"job {spec.job} is unfinished; resume it with: {request.again or resume_command()}")
        raise
    finally:
        spent.save()
        output.look(clock.monotonic(), last=True)
        screen.close()
    document = result_document(spec, state, counts, spent.seconds, folder, resumable=resumable)
    logs.keep_events(folder, events)
    run_folder.write_json(folder / resume.RESULT_FILE, document)
    if not resumable:
        await finish_trackers(spec, document)
    if state.phase is not Phase.COMPLETED:
        failed = failure_text(state, folder, resumable=resumable)
        print(without_passwords(failed), file=sys.stderr)  # noqa: T201
    told = json.dumps(document) if request.as_json else summary_text(document)
    print(without_passwords(told))  # noqa: T201
    if state.phase is Phase.COMPLETED and not request.as_json and sys.stdout.isatty():
        print(f"\n{await loss_chart(spec.storage)}".rstrip())  # noqa: T201
    return exit_codes.OK if state.phase is Phase.COMPLETED else exit_codes.JOB_FAILED


async def _run_to_the_end(
    cluster: LocalCluster, reporter: ProgressReporter, folder: Path, screen: Display
) -> JobState:
    who = (
        f"no master, queue in {cluster.url}" if cluster.masterless else f"master {await cluster.master_url()}"
    )
    cluster.run_beside(
        partial(cluster.publish, partial(_publish, cluster)), "telling commands the master's address"
    )
    if cluster.settings.etcd is not None:
        who += f", existing etcd at {cluster.etcd_access}"
    screen.event(f"job {cluster.spec.job}: {who}, logs in {folder / 'logs'}")
    if not cluster.masterless:
        token = folder / "tokens" / "admin"
        screen.event(
            f"in a browser: {cluster.url}"
            + (f", with the token in {token}, or by `trireme dashboard`" if token.exists() else "")
        )
    report = partial(
        reporter.run, lambda: cluster.client(REQUEST_TIMEOUT_S), lambda: cluster.lost_leases.etcd_silent_s
    )
    cluster.run_beside(report, "showing progress")
    return await cluster.wait()


async def _is_saved(cluster: LocalCluster) -> bool:
    """Whether there is a checkpoint to go on from; True if that cannot be found out."""
    try:
        return await cluster.saved_step() is not None
    except PeerError:
        return True


def _publish(cluster: LocalCluster, url: str) -> None:
    """Other commands find the leading master by the run file."""
    facts = {"job": cluster.spec.job, "url": url, **cluster.etcd_access.facts()}
    run_folder.write_json(cluster.folder / run_folder.RUN_FILE, facts)


def storage_of(base: str | None, job: str, folder: Path, last: str = "") -> str:
    """The storage of a run. `base`: value of --storage. `last`: storage of the run that is resumed."""
    if base is None:
        return str(folder)
    home = files.join(files.absolute(base), job)
    return last if last.startswith(f"{home}/") else files.join(home, ids.new_id("run"))


async def check_storage(url: str, report: Callable[[str], None]) -> None:
    """Try a write and a read there, and delete unfinished files of a killed run: no other run uses this
    place.

    Raises UsageError, Unauthorized, PeerError (not reachable); the message says what to do.
    """
    work = asyncio.get_running_loop().run_in_executor(None, _check, url)
    done, _ = await asyncio.wait([work], timeout=REPORT_AFTER_S)
    if not done and is_s3(url):
        report(f"waiting for {url} at {endpoint() or 'Amazon S3'}, at most {REQUEST_S:g} s a request")
    try:
        await work
    except TriremeError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        message = f"the job's storage cannot be used: {error}"
        match error:
            case ConnectionError():
                raise PeerError(message) from error
            case PermissionError() if is_s3(url):
                raise Unauthorized(message) from error
            case _:
                raise UsageError(message, hint="give another --storage") from error


def _check(url: str) -> None:
    files.check_writable(url)
    files.sweep(url)
