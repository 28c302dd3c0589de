"""Writes trireme/client/synchronous.py: AsyncClient without its awaits. A test compares the file with what
this gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "trireme" / "client"
SOURCE, DERIVED = CLIENT / "asynchronous.py", CLIENT / "synchronous.py"
PROMISE = (
    '"""AsyncClient without its awaits, for notebooks and scripts. `make clients` derives this file from\n'
    'asynchronous.py: change that."""\n'
)
WORDS = {
    r"\basync (def|with|for)\b": r"\1",
    r"\bawait ": "",
    r"import asyncio\n": "",
    r"\basyncio\.sleep\b": "clock.sleep",
    r"\bAsyncIterator\b": "Iterator",
    r"\bAsyncClient\b": "Client",
    r"\bAsyncBaseTransport\b": "BaseTransport",
    r"\b__a(enter|exit)__\b": r"__\1__",
    r"\baclose\b": "close",
}


def derived() -> str:
    """The text of DERIVED, formatted."""
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, word in WORDS.items():
        text = re.sub(pattern, word, text)
    text = re.sub(r'^""".*?"""\n', PROMISE, text, count=1, flags=re.DOTALL)
    return _ruff("format", _ruff("check", text, "--fix-only", "--unsafe-fixes", "--select", "I001,UP028"))


def _ruff(command: str, text: str, *options: str) -> str:
    call = [
        sys.executable,
        "-m",
        "ruff",
        command,
        *options,
        "--quiet",
        "--stdin-filename",
        str(DERIVED),
        "-",
    ]
    return subprocess.run(call, input=text, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603


if __name__ == "__main__":
    DERIVED.write_text(derived(), encoding="utf-8")
