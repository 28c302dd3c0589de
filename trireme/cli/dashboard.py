"""`trireme dashboard`: the dashboard in a browser that is logged in, by a code that is good once and for two
minutes.

the token ─► createLoginCode ─► http://HOST:PORT/#/login/CODE ─┬─► a browser, by a file that only its user
                                                               │   can read: command lines are seen by all
                                                               └─► printed, where there is none

The token itself is in no address, log, file or command line.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import sys
import tempfile
import webbrowser
from pathlib import Path
from urllib.parse import quote

from trireme.cli import exit_codes
from trireme.cli.targets import job_target
from trireme.client.exchange import MASTERLESS
from trireme.view.job_address import JOBS, client_of
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.rest import LoginCode

SHOWN_BY = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")  # without one of them, browsers here draw text


def open_dashboard(
    job: str | None, data_dir: Path | None, url: str | None, *, print_only: bool, as_json: bool
) -> int:
    """Returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    try:
        target = job_target(job, data_dir, url)
        if target.address.startswith(MASTERLESS):
            raise Conflict(
                "a job without a master has no dashboard",
                hint="`trireme status` and `trireme metrics --plot --follow` show it here",
            )
        masters, _, name = target.address.partition(JOBS)
        found, master = asyncio.run(_code_of(masters, target.token))
        route = f"/jobs/{quote(name, safe='')}" if name else "/"
        page = f"{master}/#/login/{found.code}{route}"
        browser = None if print_only or as_json else _browser()
        shown = browser is not None and browser.open(_opening(master, page).as_uri())
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except OSError as error:
        problem = InvalidArgument(
            f"the page that opens the dashboard cannot be written: {error}", hint="--print shows the address"
        )
        return exit_codes.report_error(problem, as_json=as_json)
    if as_json:
        print(json.dumps({"url": page, "valid_s": found.valid_s}))  # noqa: T201
    elif shown:
        told = f"{master}{f'/#{route}' if name else ''} is open in a browser, logged in; if it shows nothing"
        sys.stderr.write(f"{told}: trireme dashboard --print\n")
    else:
        why = "" if print_only else "there is no browser here; "
        sys.stderr.write(f"{why}this address logs in whoever opens it first, within {found.valid_s:.0f} s:\n")
        print(page)  # noqa: T201
    return exit_codes.OK


async def _code_of(masters: str, token: str) -> tuple[LoginCode, str]:
    """A code, and the master that made it: the first of `masters` (with commas) that answers. Raises
    PeerError, Unauthorized."""
    error: PeerError | None = None
    for master in (each.strip().rstrip("/") for each in masters.split(",")):
        try:
            async with client_of(master, token) as client:
                return await client.create_login_code(), master
        except PeerError as failed:
            error = failed
    assert error is not None
    raise error


def _browser() -> webbrowser.BaseBrowser | None:
    """None: there is none with windows."""
    if sys.platform.startswith("linux") and not any(os.environ.get(each) for each in SHOWN_BY):
        return None
    try:
        return webbrowser.get()
    except webbrowser.Error:
        return None


def _opening(master: str, page: str) -> Path:
    """A file that leads a browser to `page`; the next one for that master takes its place. Raises OSError,
    InvalidArgument."""
    folder = Path(tempfile.gettempdir()) / f"trireme-dashboard-{os.geteuid()}"
    private_files.make_own_folder(folder)
    path = folder / f"{re.sub('[^A-Za-z0-9.-]', '-', master)}.html"
    link = html.escape(page, quote=True)
    text = (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={link}">'
        f'<title>Trireme</title><p><a href="{link}">The dashboard</a></p>\n'
    )
    private_files.replace(path, text.encode())
    return path
