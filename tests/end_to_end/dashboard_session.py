"""What the parts of the dashboard's test share: a browser at the page of a cluster, and words for what is
there."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from clients.tools import node_modules_of_dashboard
from tests.end_to_end.command import Command
from tests.equipment.browser import Page
from tests.equipment.command_lines import command_line

WIDE, NARROW = 1280, 400


def button(text: str) -> str:
    return f"[...document.querySelectorAll('button')].find((each) => each.textContent === {json.dumps(text)})"


def says(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


def fact(name: str) -> str:
    """The value beside a name of the list of facts."""
    return (
        "[...document.querySelectorAll('dt')].find((each) => each.textContent === "
        f"{json.dumps(name)})?.nextElementSibling.textContent"
    )


class Session:
    """What the parts of the test share."""

    def __init__(self, page: Page, trireme: Command, pictures: Path | None) -> None:
        self.page, self.trireme, self.pictures = page, trireme, pictures
        self.axe = (node_modules_of_dashboard() / "axe-core" / "axe.min.js").read_text()

    async def picture(self, name: str) -> None:
        """In both schemes, wide and narrow: axe-core finds nothing, and nothing is wider than the window but
        what scrolls by itself."""
        for scheme, width in (("light", WIDE), ("dark", WIDE), ("light", NARROW)):
            await self.page.dark(on=scheme == "dark")
            await self.page.width(width)
            await asyncio.sleep(0.3)  # charts are drawn anew
            if self.pictures is not None:
                await self.page.picture(
                    self.pictures / f"{name}-{scheme}{'' if width == WIDE else '-narrow'}.png"
                )
            await self.page.js(f"{self.axe}; true")
            found = await self.page.js(
                "axe.run(document, {resultTypes: ['violations']}).then((each) => each.violations)"
            )
            serious = [
                (each["id"], each["impact"], [node["html"] for node in each["nodes"]][:3]) for each in found
            ]
            assert serious == [], (name, scheme, width, serious)
            assert await self.page.js("document.documentElement.scrollWidth <= innerWidth"), (name, width)
        await self.page.width(WIDE)
        await self.page.dark(on=False)

    async def log_in(self, token: str) -> None:
        """By the keyboard alone: the field has the focus."""
        await self.page.until("document.activeElement?.id === 'token'")
        await self.page.type(token)
        await self.page.press("Enter")

    async def press(self, text: str) -> None:
        """By the keyboard."""
        await self.page.until(button(text))
        await self.page.js(f"{button(text)}.focus()")
        await self.page.press("Enter")

    def kill(self, is_meant: Callable[[psutil.Process, str], bool]) -> None:
        found = [each for each in self.trireme.family() if is_meant(each, command_line(each))]
        assert len(found) == 1, found
        found[0].send_signal(signal.SIGKILL)
