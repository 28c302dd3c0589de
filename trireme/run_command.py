"""`trireme run`: settings -> inspection of the script -> local cluster -> progress -> summary and exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import clock, telemetry
from shared.errors import TriremeError
from shared.records import JobSpec, JobState, Phase
from trireme import exits, run_dir
from trireme.follow import Follower
from trireme.local import HOST, LocalCluster
from trireme.preflight import Inspection, ScriptError, check_path, inspect
from trireme.progress import Display, display
from trireme.report import failure_text, result_document, summary_text
from trireme.spec import (
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

DATA_DIR = Path(".trireme")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command line as it was given; flags that were not are None."""

    script: Path
    flags: Mapping[str, Any]
    assignments: tuple[str, ...] = ()
    check: bool = True
    dry_run: bool = False
    as_json: bool = False


def run_command(request: RunRequest) -> int:
    """Returns the exit code; says everything that is to be said."""
    telemetry.configure(level="ERROR", json=False)
    try:
        check_path(request.script)
        return asyncio.run(_run(request))
    except ScriptError as error:
        return exits.tell_script_error(error.failure, as_json=request.as_json)
    except TriremeError as error:
        return exits.tell(error, as_json=request.as_json)
    except asyncio.CancelledError:
        return exits.INTERRUPTED


async def _run(request: RunRequest) -> int:
    interrupt = Interrupt()
    with interrupt.listening():
        decided = _decided(request)
        port, standbys = _number(decided, "port", 65535), _number(decided, "standbys", 16)
        if port and not request.dry_run:
            run_dir.check_port(HOST, port)
        settings, inspection = await _with_script(request, decided)
        job = str(settings["job"].value) if "job" in settings else job_name(request.script)
        data_dir = Path(str(settings["data_dir"].value)) if "data_dir" in settings else DATA_DIR
        spec = job_spec(
            settings | {"job": Setting(job, "--job")},
            script=str(request.script.absolute()),
            dataset=inspection.dataset,
            evaluation_dataset=inspection.evaluation_dataset,
            storage=str((data_dir / job).absolute()),
        )
        if request.dry_run:
            print(spec.model_dump_json(exclude_none=True, indent=2))  # noqa: T201
            return exits.OK
        with run_dir.opened(data_dir, job) as folder:
            return await _train(spec, folder, port, standbys, interrupt, as_json=request.as_json)


def _decided(request: RunRequest) -> dict[str, Setting]:
    """What is said outside the script: looked at first, for importing torch takes seconds and a wrong flag should not."""
    flags = from_flags({**from_assignments(request.assignments), **_given(request.flags)})
    decided = merge([flags, from_environment(), from_toml(Path(TOML))])
    check_fields(decided)
    return decided


async def _with_script(request: RunRequest, decided: dict[str, Setting]) -> tuple[dict[str, Setting], Inspection]:
    known = {name: setting.value for name, setting in decided.items() if name in SETTINGS}
    inspection = await inspect(request.script, known, check=request.check)
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


class Interrupt:
    """The first Ctrl-C (or SIGTERM) cancels the run, which stops its children; the second one kills them."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self.count = 0
        self._run = asyncio.current_task()

    def listening(self) -> _Listening:
        return _Listening(self)

    def hear(self) -> None:
        self.count += 1
        if self.count == 1 and self._run is not None:
            print("stopping; once more to kill", file=sys.stderr)  # noqa: T201
            self._run.cancel()
        elif self.cluster is not None:
            self.cluster.kill_all()


class _Listening:
    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt.hear)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


async def _train(spec: JobSpec, folder: Path, port: int, standbys: int, interrupt: Interrupt, *, as_json: bool) -> int:
    screen = display()
    started = clock.monotonic()
    try:
        follower = Follower(spec.mode, screen)
        cluster = LocalCluster(spec, folder, port=port, standbys=standbys, on_event=follower.on_child)
        interrupt.cluster = cluster
        async with cluster:
            state = await _follow_to_the_end(cluster, follower, folder, screen)
            counts = await follower.last_counts(cluster)
        seconds = clock.monotonic() - started
    finally:
        screen.close()
    document = result_document(spec, state, counts, seconds, folder)
    if state.phase is not Phase.COMPLETED:
        print(failure_text(state, folder), file=sys.stderr)  # noqa: T201
    print(json.dumps(document) if as_json else summary_text(document))  # noqa: T201
    return exits.OK if state.phase is Phase.COMPLETED else exits.JOB_FAILED


async def _follow_to_the_end(cluster: LocalCluster, follower: Follower, folder: Path, screen: Display) -> JobState:
    url = await cluster.master_url()
    run_dir.write_run_file(folder, {"job": cluster.spec.job, "url": url, "etcd": cluster.embedded.url})
    screen.event(f"job {cluster.spec.job}: master {url}, logs in {folder / 'logs'}")
    cluster.accompany(follower.run(cluster))
    return await cluster.wait()
