"""The process of a background run: `trireme run` without a terminal, asked for by a line of JSON on stdin, told about on stdout.

It dies with the process that started it, even if that one is killed; its members die with it. SIGTERM is Ctrl-C.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from trireme.background.errors import in_python
from trireme.background.messages import Lines, MessageDisplay, Messages
from trireme.cli.run import RunRequest, run_job
from trireme.preflight import ScriptError, check_path
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.process_setup import die_with
from trireme_shared.protocol.errors import TriremeError


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if sys.platform == "linux":
        die_with(asked["parent"])
    stream = os.fdopen(
        os.dup(1), "wb"
    )  # whatever else prints writes to stderr, where the parent looks if this process dies
    os.dup2(2, 1)
    messages = Messages(stream)
    messages.send("ended", run(asked, messages))
    messages.close()
    os._exit(0)  # the teardown of modules takes tenths of a second


def run(asked: dict[str, Any], messages: Messages) -> dict[str, Any]:
    """The last message. `asked`: the arguments of RunRequest."""
    shown = [True]

    class Display(MessageDisplay):
        def close(self) -> None:
            shown[0] = False  # why the job failed is in its result

    def tell(line: str) -> None:
        if shown[0]:
            messages.send("event", in_python(line))

    request = RunRequest(
        Path(asked["script"]),
        asked["settings"],
        check=asked["check"],
        fresh=asked["fresh"],
        insecure=asked["insecure"],
        as_json=True,
        spelling="{}",
        again=asked["again"],
        open_display=lambda spec, folder: Display(messages, spec, folder),
    )
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(Lines(tell)):
        telemetry.configure(level="ERROR", json=False)
        try:
            check_path(request.script)
            code = asyncio.run(run_job(request))
        except ScriptError as error:
            return {"failure": error.failure.model_dump()}
        except TriremeError as error:
            return {"error": error.to_map()}
        except asyncio.CancelledError:
            return {"stopped": True}
    return {"code": code, "result": json.loads(printed.getvalue().splitlines()[-1])}


if __name__ == "__main__":
    main()
