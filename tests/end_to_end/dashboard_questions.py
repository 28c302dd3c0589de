"""The questions that people bring to a dashboard, asked in its test: what became of ended jobs, why a
script has failed, how two jobs differ, what a curve looks like without its noise and its outliers, and all
of that on a phone and on paper."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.end_to_end.dashboard_session import Session, button, says
from tests.end_to_end.scripts import EVALUATION, write_script
from tests.equipment.browser import Page

PHONE = 390
SPIKE_AT, SPIKE = 400, 1e6
LOSS = "document.querySelector('figure[data-metric=loss]')"
CELLS = "Object.fromEntries([...{row}.cells].map((each) => [each.dataset.title, each.textContent.trim()]))"


def row_of(job: str) -> str:
    link = f'tbody th a[href="#/jobs/{job}"]'
    return f"document.querySelector({json.dumps(link)})?.closest('tr')"


async def cells(page: Page, row: str) -> dict[str, str]:
    found: dict[str, str] = await page.js(CELLS.format(row=row))
    return found


async def ended_jobs_say_what_became_of_them(session: Session) -> None:
    """`mine` and `other` are COMPLETED, `broken` is FAILED."""
    page = session.page
    await page.js("location.hash = '#/'")
    for job, metric in (("mine", True), ("other", True), ("broken", False)):
        row = row_of(job)
        await page.until(f"{row}?.querySelector('.state.COMPLETED, .state.FAILED')", 150)
        if metric:
            await page.until(f"{row}.querySelector('.metric')")
            time = f"{row}.querySelector('[data-title=Time]').textContent"  # not before its members have left
            await page.until(f"/[0-9]/.test({time})")
            told = await cells(page, row)
            assert re.fullmatch(r"[\d.]+ s|\d+ min( \d+ s)?", told["Time"]), told
            assert re.fullmatch(r"[\d.]+", told["Loss"]), told
            assert re.match(r"mse [\d.]+", told["Metrics"]), told
        else:
            await page.until(f"{row}.innerText.includes('ZeroDivisionError: division by zero')")
    await session.picture("jobs")


async def a_phone_shows_cards(page: Page) -> None:
    await page.width(PHONE)
    row = row_of("mine")
    await page.until(f"{row}")
    assert await page.js(f"getComputedStyle({row}).display") == "block"
    titles = await page.js(
        f"[...{row}.querySelectorAll('td')].map((each) => getComputedStyle(each, '::before').content)"
    )
    assert '"Loss"' in titles, titles
    assert await page.js("document.documentElement.scrollWidth <= innerWidth")
    await page.width(1280)


async def a_failure_is_told_with_its_traceback(session: Session) -> None:
    page = session.page
    await page.js("location.hash = '#/jobs/broken'")
    await page.until("document.querySelector('.failure pre')")
    told = await page.js("document.querySelector('.failure').innerText")
    assert "ZeroDivisionError" in told
    assert "The script has failed, in task" in told, told
    assert re.search(r"line \d+, in loss", told), "the line of the script"
    await session.picture("failed")


async def two_jobs_are_compared(session: Session) -> None:
    """They differ in their seed alone."""
    page = session.page
    await page.js("location.hash = '#/'")
    for job in ("mine", "other"):
        await page.until(row_of(job))
        await page.js(f"{row_of(job)}.querySelector('input').click()")
    await page.until(says("Compare 2 jobs"))
    await page.js("document.querySelector('a.button').click()")
    await page.until("document.querySelector('h1')?.textContent === 'Jobs compared'")
    await page.until(f"{LOSS}?.dataset.points > 0")
    names = (
        "[...document.querySelectorAll('figure[data-metric=loss] .u-label')].map((each) => each.textContent)"
    )
    await page.until(f"{names}.join() === 'step,mine,other'")
    settings = "[...document.querySelectorAll('table.settings tbody tr')]"
    rows = f"{settings}.map((row) => [...row.cells].map((each) => each.textContent.trim()))"
    await page.until(f"{settings}.length > 0")
    found = await page.js(rows)
    assert found == [["seed", "3", "4"]], found
    await page.js(f"{button('All settings')}.click()")
    await page.until(f"{settings}.length > 50")
    assert await page.js("document.querySelectorAll('table.settings tr.differs').length") == 1
    await page.js(f"{button('Those that differ')}.click()")
    await smoothed(page)
    await page.until(f"{names}.join() === 'step,mine as reported,other as reported,mine,other'")
    await session.picture("compare")
    await printed(page)


async def smoothed(page: Page) -> None:
    slider = "document.querySelector('input[type=range]')"
    await page.js(
        f"{slider}.value = {slider}.max; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    await page.until("/^[0-9,]+ steps$/.test(document.querySelector('.over').textContent)")


async def printed(page: Page) -> None:
    """Dark on the screen, light on paper, as wide as a page; then as before."""
    await page.dark(on=True)
    look = (
        "[document.querySelector('.u-wrap').style.width, "
        "getComputedStyle(document.documentElement).getPropertyValue('--text').trim()]"
    )
    await page.js(
        f"addEventListener('beforeprint', () => queueMicrotask(() => {{ window.printed_ = {look}; }}), "
        "{once: true}); true"
    )
    before = await page.js(look)
    pdf = await page.call("Page.printToPDF", printBackground=False)
    assert len(pdf["data"]) > 10_000
    on_paper = await page.js("window.printed_")
    assert on_paper == ["640px", "#1b1f24"], on_paper
    await page.until(f"JSON.stringify({look}) === {json.dumps(json.dumps(before, separators=(',', ':')))}")
    await page.dark(on=False)


async def an_outlier_does_not_flatten_a_chart(page: Page) -> None:
    """The answers of queryMetric are replaced: no step of this job has such a loss."""
    async with page.answering("*/metric-series*", with_a_spike):
        await page.reload()
        await page.until("document.querySelector('.cut')")
        told = await page.js("document.querySelector('.cut').textContent")
        assert re.fullmatch(r"1 point lies outside of [\d.]+ to [\d.]+\.", told), told
        await page.js("document.querySelector('figure figcaption button').click()")
        await page.until("!document.querySelector('.cut')")
        await page.until(button("Without outliers of loss"))
    await page.reload()


def with_a_spike(url: str) -> dict[str, Any]:
    """What listMetricSeries and queryMetric would answer."""
    if urlsplit(url).path.endswith("/metric-series"):
        kept = {"name": "loss", "first_step": 0, "last_step": 999, "points": 1000, "width": 1}
        return {"series": [kept], "next_page_token": ""}
    losses = [SPIKE if step == SPIKE_AT else 2 + step * 7 % 10 / 100 for step in range(1000)]
    points = [
        {"step": step, "last_step": step, "mean": loss, "least": loss, "most": loss, "weight": 1.0}
        for step, loss in enumerate(losses)
    ]
    return {"name": "loss", "points": points}


def broken_script(folder: Path) -> Path:
    """Its loss raises in the first minibatch."""
    folder.mkdir()
    loss = "\ndef loss(model, batch):\n    return 1 / 0\n"
    return write_script(folder, loss=loss, evaluation=EVALUATION)
