"""`trireme tensorboard`: the metrics of jobs as TensorBoard's event files, and TensorBoard on this machine.

each job's points, each once (metrics.py) ─► an event file in a folder of its own ─► TensorBoard reads the folder of all

The files are made from what the master keeps, which has each step once, so they have, too, whatever died meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from master_service.trackers.event_files import EventFiles
from trireme.cli import exit_codes
from trireme.cli.history.metrics import Open, find_metrics, follow_points, show_points
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

ENDING_S = 5.0
HOST = "127.0.0.1"


def tensorboard(jobs: Sequence[str], data_dir: Path | None, url: str | None, *, port: int, out: Path | None) -> int:
    """The exit code. `out`: only write the event files of what is known now, into a folder for each job there."""
    telemetry.configure(level="ERROR", json=False)
    try:
        if importlib.util.find_spec("tensorboard") is None:
            raise InvalidArgument("TensorBoard is not installed here", hint="pip install 'trireme[tensorboard]'")
        sources = [partial(find_metrics, job, data_dir, url, "step") for job in dict.fromkeys(jobs) or (None,)]
        if out is not None:
            asyncio.run(_export(sources, out))
            return exit_codes.OK
        with tempfile.TemporaryDirectory(prefix="trireme-tensorboard-") as folder:
            return asyncio.run(_serve(sources, Path(folder), port))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=False)
    except OSError as error:
        return exit_codes.report_error(InvalidArgument(f"event files cannot be written: {error}"), as_json=False)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


async def _export(sources: Iterable[Open], out: Path) -> None:
    for source in sources:
        name = await _name(source)
        with EventFiles(out / name) as files:
            await show_points(source, (), files.write)
        print(out / name)  # noqa: T201


async def _serve(sources: Iterable[Open], folder: Path, port: int) -> int:
    """Until TensorBoard ends. Raises TriremeError if a job is not there; what happens to it later is only told."""
    with ExitStack() as stack:
        files = [(source, stack.enter_context(EventFiles(folder / await _name(source)))) for source in sources]
        following = [asyncio.ensure_future(_follow(source, each)) for source, each in files]
        arguments = ("--logdir", str(folder), "--host", HOST, "--port", str(port), "--reload_interval", "2")
        server = await asyncio.create_subprocess_exec(sys.executable, "-m", "tensorboard.main", *arguments)
        try:
            return exit_codes.OK if await server.wait() == 0 else exit_codes.JOB_FAILED
        finally:
            for each in following:
                each.cancel()
            await asyncio.wait(following)
            if server.returncode is None:
                server.terminate()
                try:
                    await asyncio.wait_for(server.wait(), ENDING_S)
                except TimeoutError:
                    server.kill()
                    await server.wait()


async def _name(source: Open) -> str:
    async with source() as found:
        return found.job


async def _follow(source: Open, files: EventFiles) -> None:
    try:
        await follow_points(source, (), files.write)
    except (TriremeError, OSError) as error:
        print(f"{files}: nothing more is added: {error}", file=sys.stderr)  # noqa: T201
