"""The dashboard in headless Chromium, on a real cluster: a job from its start to its end, with its
evaluations and logs, a resize, a restore and a check of a checkpoint by button, a parameter server and the
leader killed, and a reload; after its end from what is stored; then by a viewer, with 10,000 points, and at
the master of one job, whose tasks are skipped and retried. One browser and one cluster for all of it.

pytest tests/end_to_end/test_dashboard.py [--pictures FOLDER]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from clients.write_openapi import OPENAPI
from master_service.api.app import make_app
from master_service.api.openapi.documentation import DOCUMENT
from master_service.api.server import Server
from master_service.dashboard import FILES
from tests.end_to_end.cluster_command import script_in, up
from tests.end_to_end.command import Command
from tests.end_to_end.dashboard_questions import (
    a_failure_is_told_with_its_traceback,
    a_phone_shows_cards,
    an_outlier_does_not_flatten_a_chart,
    broken_script,
    ended_jobs_say_what_became_of_them,
    two_jobs_are_compared,
)
from tests.end_to_end.dashboard_session import Session, button, fact, says
from tests.end_to_end.local_cluster import EPOCHS, RECORDS, STEPS, spec_of
from tests.equipment.browser import CHROMIUM, Page, browser
from tests.equipment.uvicorn_server import served
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, running, take
from tests.master_service.cluster import spec_of as spec_of_master
from trireme.client import AsyncClient, CreateJob, JobSettings, Scheduling
from trireme.pool import cluster_folder
from trireme.script_source import read_source
from trireme_shared.protocol.records import Task

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,  # a minute, and a browser
    pytest.mark.timeout(560),
    pytest.mark.skipif(
        CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
    ),
]
POINTS = 10_000
STREAMS = {"/v1/cluster/events/stream", "/v1/jobs/{job}/events/stream"}
OF_THE_ONLY_JOB = "/v1/job"
BEST = "document.querySelector('[aria-label^=Evaluations] tbody tr.best')"
EVALUATED_EVERY = 6
BUTTONS = ("Pause", "Resume", "Resize …", "Checkpoint", "Cancel …")


def test_a_job_is_followed_and_changed_in_a_browser(
    trireme: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chosen = request.config.getoption("--pictures")
    pictures = Path(chosen) if chosen else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)

    async def scenario() -> None:
        async with browser(tmp_path) as page:
            session = Session(page, trireme, pictures)
            await in_a_cluster(session)
            check_requests(page)
            await at_the_master_of_one_job(session)
            assert page.complaints == []

    with up(trireme, "--trainers", 3, "--pservers", 2, "--standbys", 1):
        asyncio.run(scenario())


async def in_a_cluster(session: Session) -> None:
    page, trireme = session.page, session.trireme
    found = cluster_folder.must_find(trireme.folder / ".trireme")
    assert "in a browser: http://127.0.0.1:" in (trireme.folder / "up.log").read_text()
    await page.goto(found.url)
    await session.picture("token")
    await nothing_is_injected(page)
    await session.log_in("wrong")
    await page.until(says("This token is unknown or has expired."))
    link = trireme.run("dashboard", "--print").out.strip()
    assert re.fullmatch(rf"{found.url}/#/login/trireme_login_[\w-]+/", link), link
    await page.goto(link)
    await page.until(says("No jobs."))
    assert await page.js("location.hash") == "#/", "the code has left the address"
    await session.press("Forget token")
    await page.goto(link)
    await page.until(says("This link was used already, is older than two minutes, or its master has ended."))
    await session.log_in(found.token)
    await page.until(says("No jobs."))

    script = script_in(trireme.folder, slow_s=1.5)
    await submit(found.url, found.token, script)
    await page.until("document.querySelector('tbody th a[href=\"#/jobs/mine\"]')")
    await session.picture("cluster")
    await page.js("document.querySelector('tbody th a').click()")
    await page.until(
        f"{fact('Step')} >= '1' && document.querySelector('figure[data-metric=loss]')?.dataset.points > 0"
    )
    assert (await page.js("document.title")).startswith("mine ")
    assert await page.js("document.activeElement.id") == "main", "the focus is at the new content"

    await session.press("Checkpoint")
    await page.until(says("A checkpoint is being made"))
    await page.until("document.querySelector('[aria-label^=\"Checkpoints\"] tbody tr')")
    await session.press("Resize …")
    await page.until("document.querySelector('dialog[open] #trainers') === document.activeElement")
    await page.js("document.activeElement.select()")
    await page.type("3")
    await session.picture("resize")
    await page.press("Enter")
    await page.until(f"{says('COMMITTED')} && {fact('Trainers')} === '3 of 3'")
    shares = (
        "[...document.querySelectorAll('#members ~ * td:nth-child(2)')].map((each) => "
        "each.textContent.trim())"
    )
    await page.until(
        f"{shares}.length === 4 && {shares}[0] === '1,024 slots' && {shares}.slice(1).every((each) "
        "=> each.startsWith('lane'))"
    )

    await page.until(says("checkpoint DONE"))
    await evaluations_and_logs(session)
    await a_checkpoint_is_verified_and_restored(session)
    session.kill(lambda _, words: "[pserver-" in words or "pserver_service" in words)
    newest = "document.querySelector('[aria-label^=Failures] li')?.innerText"
    receipt = await page.until(
        f"{newest}?.includes('pserver-0 is gone') && {newest}.includes('training again') && {newest}"
    )
    assert re.search(
        r"pserver-0 is gone\s+training again after \d+\.\d s from step \d+; [\d,]+ records trained "
        r"again, none lost",
        receipt,
    ), receipt
    await session.picture("job")

    await page.reload()
    await page.until(
        f"{says('training again after')} && {fact('Step')} >= '1' && "
        "document.querySelector('figure')?.dataset.points > 0"
    )

    await another_master_leads(session, found)
    await page.until("document.querySelector('figure')?.dataset.points > 0")
    assert await page.js("location.origin") == found.url, "the page was not left"

    (trireme.folder / "slow").unlink()
    await page.until("document.querySelector('.state')?.textContent === 'COMPLETED'")
    await page.until(f"{fact('Records trained')} === '{EPOCHS * RECORDS:,}'")
    await page.until(fact("mse"))
    await page.reload()  # nobody leads the job any more
    for name in ("loss", "evaluation.mse"):
        await page.until(f"document.querySelector('figure[data-metric=\"{name}\"]')?.dataset.points > 0")
    await page.until(f"{fact('Step')} === '{STEPS}' && {fact('Loss of the epoch')}.length > 1")
    rows = "document.querySelectorAll('[aria-label^=Evaluations] tbody tr').length"
    await page.until(f"{rows} === {(STEPS - 1) // EVALUATED_EVERY + 1}")
    row = await page.js(f"[...{BEST}.cells].map((each) => each.textContent.trim())")
    assert (row[0], row[1], row[-1]) == ("after training", str(STEPS), "the best"), row
    assert row[2] == await page.js(fact("mse")), row
    await session.picture("ended")

    await submit(found.url, found.token, script, "other", seed=4)
    await submit(found.url, found.token, broken_script(trireme.folder / "broken"), "broken")
    await ended_jobs_say_what_became_of_them(session)
    await a_phone_shows_cards(page)
    await two_jobs_are_compared(session)
    await a_failure_is_told_with_its_traceback(session)
    await page.js("location.hash = '#/jobs/mine'")
    await page.until("document.querySelector('h1')?.textContent === 'mine'")
    await an_outlier_does_not_flatten_a_chart(page)
    await as_a_viewer(session, trireme)
    await an_evaluation_that_was_left_out(session)
    await ten_thousand_points(page)


async def evaluations_and_logs(session: Session) -> None:
    page = session.page
    await page.until(BEST)
    row = await page.js(f"[...{BEST}.cells].map((each) => each.textContent.trim())")
    assert int(row[0]) * EVALUATED_EVERY == int(row[1]), row
    await page.js(f"{button('Logs')}.focus()")
    await page.press("Enter")
    assert await page.js("document.activeElement.id") == "logs", "the focus is at the part that was chosen"
    select = "document.querySelector('#logs ~ * select')"
    await page.until(f"{select}?.options.length > 1")
    chosen = f"[...{select}.options].find((each) => each.value.includes('trainer-0')).value"
    await page.js(
        f"{select}.value = {chosen}; {select}.dispatchEvent(new Event('change', {{bubbles: true}}))"
    )
    lines = "document.querySelectorAll('.log > div').length"
    await page.until(f"{lines} > 5 && document.querySelector('.log').innerText.includes('task_started')")
    before = await page.js("document.querySelector('.log').lastElementChild.innerText")
    await page.until(f"document.querySelector('.log').lastElementChild.innerText !== {json.dumps(before)}")
    await page.js("document.querySelector('input[type=search]').focus()")
    await page.type("no line has this")
    await page.until(says("No line has these words."))
    await page.js("document.activeElement.select()")
    await page.type("TASK_started")
    await page.until(
        "[...document.querySelectorAll('.log b')].every((each) => each.textContent === 'task_started')"
    )
    assert await page.js(f"{lines} > 0")
    await session.picture("logs")


async def a_checkpoint_is_verified_and_restored(session: Session) -> None:
    page = session.page
    rows = "document.querySelectorAll('[aria-label^=Checkpoints] tbody tr')"

    async def press(words: str) -> None:
        await page.js(
            f"[...{rows}[0].querySelectorAll('button')].find((each) => each.textContent === "
            f"'{words}').focus()"
        )
        await page.press("Enter")

    await press("Verify")
    await page.until(says("every part is as it was written"))
    await press("Restore …")
    await page.until("document.querySelector('dialog[open]')?.innerText.includes('Go back to step')")
    await session.picture("restore")
    await session.press("Go back")
    await page.until(says("the job goes on from there"))
    await page.until("document.querySelector('.state')?.textContent === 'RUNNING'")


async def nothing_is_injected(page: Page) -> None:
    """The policy as the browser understands it: no script, style, frame or request but those of the
    service."""
    inline = "document.head.appendChild(document.createElement('script')).append('window.injected_ = 1')"
    await page.js(f"try {{ {inline} }} catch {{}}; true")
    assert await page.js("window.injected_") is None
    refused = "(() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } })()"
    assert await page.js(refused) == "TypeError", "text becomes no HTML"
    elsewhere = "fetch('http://127.0.0.1:9/').catch((error) => error.name)"
    assert await page.js(elsewhere) == "TypeError"
    style = "document.head.appendChild(document.createElement('style')).append('body { display: none }')"
    await page.js(f"{style}; true")
    assert await page.js("getComputedStyle(document.body).display") == "block"
    told = [
        text
        for text in page.complaints
        if "Content Security Policy" in text or "TrustedHTML" in text or "Trusted" in text
    ]
    assert told == page.complaints
    assert len(told) >= 3
    page.complaints.clear()
    page.requests[:] = [url for url in page.requests if url != "http://127.0.0.1:9/"]


async def another_master_leads(session: Session, found: cluster_folder.ClusterFacts) -> None:
    """The leader is killed, then the master that the page was opened at: started again, it stands by and
    passes requests on."""
    page = session.page
    led_again = (
        "(document.querySelector('[aria-label^=Failures]').innerText.match(/the job was led again/g) "
        "?? []).length"
    )
    before = await page.js(led_again)  # a busy machine may have changed it by itself
    async with AsyncClient(found.url, token=found.token) as client:
        leader = (await client.get_job("mine")).master.url
    session.kill(lambda process, _: listens_at(process, leader))
    await page.until(f"{led_again} > {before}")
    for _ in range(2):  # this master, whether it is the leader or not
        step = await page.js(fact("Step"))
        session.kill(lambda process, _: listens_at(process, found.url))
        await until(
            lambda: any(listens_at(each, found.url) for each in session.trireme.family()), "the master", 60
        )
        await page.until(
            f"{fact('Step')} !== {json.dumps(step)} && document.querySelector('.connection.connected')"
        )


def listens_at(process: psutil.Process, url: str) -> bool:
    with contextlib.suppress(psutil.Error):
        port = urlsplit(url).port
        return any(
            each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp")
        )
    return False


async def submit(url: str, token: str, script: Path, name: str = "mine", **changes: object) -> None:
    spec = spec_of(
        script.parents[1],
        trainers=2,
        pservers=1,
        evaluate_every=EVALUATED_EVERY,
        keep_best="mse:min",
        **changes,
    )
    settings = JobSettings.model_validate(spec.model_dump(mode="json", include=set(JobSettings.model_fields)))
    async with AsyncClient(url, token=token) as client:
        await client.create_job(
            CreateJob(
                name=name,
                settings=settings,
                source=read_source(script),
                scheduling=Scheduling(max_trainers=2),
            )
        )


async def as_a_viewer(session: Session, trireme: Command) -> None:
    page = session.page
    token = (trireme.folder / ".trireme" / "_cluster" / "tokens" / "viewer").read_text().strip()
    await session.press("Forget token")
    await session.log_in(token)
    await page.until(says("The token is a viewer's, which may only read"))
    for text in BUTTONS:
        assert await page.js(f"{button(text)}.getAttribute('aria-disabled')") == "true"
        await session.press(text)
        assert "viewer" in await page.js("document.querySelector('.said').textContent")
    assert await page.js("document.querySelector('dialog[open]')") is None


async def an_evaluation_that_was_left_out(session: Session) -> None:
    """The answer of listEvaluations is replaced: none was left out in this run."""
    found = {
        "number": 2,
        "step": 12,
        "timeline": 0,
        "checkpoint": "",
        "metrics": {},
        "left_out": "<b>damaged</b> files",
    }
    page = session.page
    async with page.answering("*/evaluations*", lambda _: {"evaluations": [found], "next_page_token": ""}):
        await page.reload()
        await page.until(says("left out: <b>damaged</b> files"))
        await session.picture("left-out")


async def ten_thousand_points(page: Page) -> None:
    """The answers of queryMetric are replaced: no series has so many points. Frame times while the pointer
    moves and a part is zoomed."""
    async with page.answering("*/metric-series*", series):
        await page.reload()
        await page.until(f"document.querySelector('figure')?.dataset.points == {POINTS}")
        await page.js("document.querySelector('figure').scrollIntoView({block: 'center'})")
        await page.js(
            "(() => { window.frames_ = []; let last = performance.now(); "
            "requestAnimationFrame(function next(now) { frames_.push(now - last); last = now; "
            "requestAnimationFrame(next); }); })()"
        )
        place = await page.js(
            "(({x, y, width, height}) => ({x, y, width, "
            "height}))(document.querySelector('.u-over').getBoundingClientRect())"
        )
        for share in range(40):
            await page.mouse(
                "mouseMoved", place["x"] + place["width"] * share / 40, place["y"] + place["height"] / 2
            )
        for kind, share in (("mousePressed", 0.2), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
            await page.mouse(kind, place["x"] + place["width"] * share, place["y"] + place["height"] / 2)
        await asyncio.sleep(2.5)  # the points are asked for again meanwhile
        frames = (await page.js("frames_"))[1:]
    late = quantiles(frames, n=20)[-1]
    told = (
        f"{POINTS:,} points: {len(frames)} frames, median {median(frames):.1f} ms, 95 % below "
        f"{late:.1f} ms, longest {max(frames):.1f} ms\n"
    )
    sys.stdout.write(told)
    assert median(frames) < 100, frames  # a busy machine may be late now and then


def series(url: str) -> dict[str, Any]:
    """What listMetricSeries and queryMetric would answer."""
    parts = urlsplit(url)
    if parts.path.endswith("/metric-series"):
        kept = {"name": "loss", "first_step": 0, "last_step": 2 * POINTS - 1, "points": POINTS, "width": 2}
        return {"series": [kept], "next_page_token": ""}
    query = dict(part.split("=") for part in parts.query.split("&"))
    first, last, most = (
        int(query.get("from_step", 0)),
        int(query.get("to_step", 2 * POINTS)),
        int(query["points"]),
    )
    steps = range(first - first % 2, min(last + 1, 2 * POINTS), 2)
    share = -(-len(steps) // most)  # so many of them in one point
    points = [
        {
            "step": step,
            "last_step": step + 2 * share - 1,
            "mean": 5000 / (step + 1000),
            "least": 4000 / (step + 1000),
            "most": 6000 / (step + 1000),
            "weight": 1.0,
        }
        for step in steps[::share]
    ]
    return {"name": "loss", "points": points}


def check_requests(page: Page) -> None:
    """Everything came from the cluster's masters, by the API's document; no address names a token."""
    paths = {
        re.compile(re.sub(r"{\w+}", "[^/]+", each))
        for each in {*json.loads(OPENAPI.read_bytes())["paths"], *STREAMS}
    }
    origins, unknown = set(), set()
    for url in page.requests:
        if url.startswith("data:"):
            continue
        parts = urlsplit(url)
        origins.add(f"{parts.scheme}://{parts.netloc}")
        if parts.path not in {*FILES, DOCUMENT, OF_THE_ONLY_JOB} and not any(
            each.fullmatch(parts.path) for each in paths
        ):
            unknown.add(url)
        assert "token" not in re.sub(r"page_token=[\w-]*", "", url)
    assert unknown == set()
    assert len(origins) == 1, origins


async def at_the_master_of_one_job(session: Session) -> None:
    page = session.page
    cluster = MasterCluster(spec_of_master())
    async with running(cluster, "t1") as master, served(Server(make_app(master))) as port:
        await page.goto(f"http://127.0.0.1:{port}/")
        await page.until("document.querySelector('h1')?.textContent === 'j'")
        await page.until(says("Jobs of trireme run cannot be paused or cancelled here"))
        assert await page.js(f"{button('Pause')}.getAttribute('aria-disabled')") == "true"
        assert await page.js(f"{button('Resize …')}.getAttribute('aria-disabled')") == "false"
        await page.until("document.querySelectorAll('#members ~ * tbody tr').length === 2")
        await page.until(says("started without a folder of logs"))
        await a_task_is_skipped_and_retried(session, await take(cluster, master))
        await session.picture("single")
        await page.goto("about:blank")  # its stream of events ends


async def a_task_is_skipped_and_retried(session: Session, task: Task) -> None:
    page = session.page
    await page.until("document.querySelector('summary')")
    await page.js("document.querySelector('summary').focus()")
    await page.press("Enter")
    row = f"document.querySelector('button[aria-label=\"{{}} task {task.task_id}\"]')"
    for verb, said, next_one in (("Skip", "is discarded", "Retry"), ("Retry", "is given out again", "Skip")):
        await page.until(row.format(verb))
        await page.js(f"{row.format(verb)}.focus()")
        await page.press("Enter")
        await page.until(says(f"Task {task.task_id} {said}."))
        await page.until(row.format(next_one))
