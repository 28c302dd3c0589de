"""`trireme run`: settings -> inspection of the script -> what is there already -> local cluster -> summary and exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import TriremeError
from shared.records import Dispatch, JobSpec, JobState, Phase
from shared.runtime import clock, telemetry
from trireme.cli import exit_codes
from trireme.launch import resume, run_folder, run_storage
from trireme.launch.cluster import HOST, LocalCluster
from trireme.launch.interrupt import InterruptHandler, resume_command
from trireme.launch.model_facts import Facts
from trireme.launch.preflight import Inspection, ScriptError, check_path, inspect
from trireme.launch.processes import ForkServer
from trireme.settings import (
    SETTINGS,
    TOML,
    Setting,
    UsageError,
    check_fields,
    from_assignments,
    from_environment,
    from_flags,
    from_script,
    from_toml,
    job_name,
    job_spec,
    merge,
)
from trireme.view.live_progress import ProgressReporter
from trireme.view.progress import Display, display
from trireme.view.report import failure_text, result_document, summary_text

PUBLISH_S = 5.0
REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command line as it was given; flags that were not are None."""

    script: Path
    flags: Mapping[str, Any]
    assignments: tuple[str, ...] = ()
    check: bool = True
    dry_run: bool = False
    fresh: bool = False
    as_json: bool = False


def run_command(request: RunRequest) -> int:
    """Returns the exit code; says everything that is to be said."""
    telemetry.configure(level="ERROR", json=False)
    try:
        check_path(request.script)
        return asyncio.run(_run(request))
    except ScriptError as error:
        return exit_codes.report_script_error(error.failure, as_json=request.as_json)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=request.as_json)
    except asyncio.CancelledError:
        return exit_codes.INTERRUPTED


async def _run(request: RunRequest) -> int:
    interrupt = InterruptHandler()
    with interrupt, ForkServer() as forks:
        decided = _decided(request)
        port = _number(decided, "port", 65535)
        extra = {name: _number(decided, name, 16) for name in ("standbys", "spare_pservers")}
        if port and not request.dry_run:
            run_folder.check_port(HOST, port)
        settings, inspection = await _with_script(request, decided, forks)
        job = str(settings["job"].value) if "job" in settings else job_name(request.script)
        data_dir = Path(str(settings["data_dir"].value)) if "data_dir" in settings else run_folder.DATA_DIR
        base = str(settings["storage"].value) if "storage" in settings else None
        spec = job_spec(
            settings | {"job": Setting(job, "--job")},
            script=str(request.script.absolute()),
            dataset=inspection.dataset,
            evaluation_dataset=inspection.evaluation_dataset,
            storage=run_storage.place_of(base, job, (data_dir / job).absolute()),
        )
        if spec.dispatch is Dispatch.ETCD and (port or extra["standbys"]):
            named = "port" if port else "standbys"
            msg = f"{decided[named].origin} is about masters, and with dispatch etcd there is none; leave it out"
            raise UsageError(msg)
        if request.dry_run:
            print(spec.model_dump_json(indent=2))  # noqa: T201
            return exit_codes.OK
        with run_folder.opened(data_dir, job) as folder:
            remains, script = resume.examine(folder), resume.script_digest(request.script)
            last = run_storage.place_of(base, job, folder, remains.spec.storage if remains.spec else "")
            going_on = spec.model_copy(update={"storage": last})
            plan = resume.decide(remains, going_on, script, folder, fresh=request.fresh, model=inspection.model)
            if plan.sentence:
                print(plan.sentence, file=sys.stderr)  # noqa: T201
            if plan.start is resume.Start.DONE and remains.result is not None:
                print(json.dumps(remains.result) if request.as_json else summary_text(remains.result))  # noqa: T201
                return exit_codes.OK
            spec = spec if plan.start is resume.Start.NEW else going_on
            await run_storage.check(spec.storage, lambda sentence: print(sentence, file=sys.stderr))  # noqa: T201
            _prepare(folder, plan.start, script, inspection.model)
            return await _train(spec, folder, port, extra, interrupt, forks, as_json=request.as_json)


def _prepare(folder: Path, start: resume.Start, script: str, model: Facts | None) -> None:
    """Raises UsageError if the folder's content cannot be moved or written."""
    try:
        if start is resume.Start.NEW:
            resume.set_aside(folder)
            resume.write_start(folder, script, model)
        (folder / run_folder.RUN_FILE).unlink(missing_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        msg = f"what the last run left in {folder} cannot be moved: {error}; choose another --data-dir"
        raise UsageError(msg) from error


def _decided(request: RunRequest) -> dict[str, Setting]:
    """What is said outside the script: looked at first, for importing torch takes seconds and a wrong flag should not."""
    flags = from_flags({**from_assignments(request.assignments), **_given(request.flags)})
    decided = merge([flags, from_environment(), from_toml(Path(TOML))])
    check_fields(decided)
    return decided


async def _with_script(
    request: RunRequest, decided: dict[str, Setting], forks: ForkServer
) -> tuple[dict[str, Setting], Inspection]:
    known = {name: setting.value for name, setting in decided.items() if name in SETTINGS}
    inspection = await inspect(request.script, known, check=request.check, start=forks.start)
    return merge([from_script(inspection.config)]) | decided, inspection


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _number(settings: Mapping[str, Setting], name: str, highest: int) -> int:
    setting = settings.get(name, Setting(0, name))
    try:
        value = int(setting.value)
    except (TypeError, ValueError):
        value = -1
    if not 0 <= value <= highest:
        msg = f"{setting.origin} = {setting.value!r}: a whole number from 0 to {highest} is needed"
        raise UsageError(msg)
    return value


async def _train(
    spec: JobSpec,
    folder: Path,
    port: int,
    extra: Mapping[str, int],
    interrupt: InterruptHandler,
    forks: ForkServer,
    *,
    as_json: bool,
) -> int:
    """`extra`: how many processes of a kind wait for another one's death."""
    screen = display()
    started = clock.monotonic()
    try:
        reporter = ProgressReporter(spec, screen)
        cluster = LocalCluster(
            spec,
            folder,
            port=port,
            standbys=extra["standbys"],
            spare_pservers=extra["spare_pservers"],
            forks=forks,
            on_event=reporter.on_child,
        )
        interrupt.cluster, interrupt.say = cluster, screen.event
        async with cluster:
            interrupt.ready = True
            state = await _follow_to_the_end(cluster, reporter, folder, screen)
            counts = await reporter.last_counts(lambda: cluster.client(REQUEST_TIMEOUT_S))
        seconds = clock.monotonic() - started
    except asyncio.CancelledError:
        screen.event(f"job {spec.job} is unfinished; go on with it: {resume_command()}")
        raise
    finally:
        screen.close()
    document = result_document(spec, state, counts, seconds, folder)
    resume.write_result(folder, document)
    if state.phase is not Phase.COMPLETED:
        print(failure_text(state, folder), file=sys.stderr)  # noqa: T201
    print(json.dumps(document) if as_json else summary_text(document))  # noqa: T201
    return exit_codes.OK if state.phase is Phase.COMPLETED else exit_codes.JOB_FAILED


async def _follow_to_the_end(
    cluster: LocalCluster, reporter: ProgressReporter, folder: Path, screen: Display
) -> JobState:
    who = f"no master, queue in {cluster.url}" if cluster.masterless else f"master {await cluster.master_url()}"
    cluster.run_beside(_publish(cluster, folder))
    screen.event(f"job {cluster.spec.job}: {who}, logs in {folder / 'logs'}")
    cluster.run_beside(reporter.run(lambda: cluster.client(REQUEST_TIMEOUT_S)))
    return await cluster.wait()


async def _publish(cluster: LocalCluster, folder: Path) -> None:
    """Other commands find the leading master by the run file, also after another one took over."""
    told = ""
    while True:
        url = cluster.url or told
        if url != told:
            run_folder.write_run_file(folder, {"job": cluster.spec.job, "url": url, "etcd": cluster.embedded.url})
            told = url
        await cluster.directory.changed(cluster.directory.revision, PUBLISH_S)
