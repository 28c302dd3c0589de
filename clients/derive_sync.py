"""Writes trireme/client/synchronous.py and connection.py: AsyncClient without its awaits. A test compares the files with what this gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "trireme" / "client"
DERIVED = {  # from what
    CLIENT / "synchronous.py": CLIENT / "asynchronous.py",
    CLIENT / "connection.py": CLIENT / "async_connection.py",
}
PROMISE = (
    '"""{} without its awaits, for notebooks and scripts. `make clients` derives this file from {}: change that."""\n'
)
WORDS = {
    r"\basync (def|with|for)\b": r"\1",
    r"\bawait ": "",
    r"import asyncio\n": "",
    r"\basyncio\.sleep\b": "clock.sleep",
    r"\bAsyncIterator\b": "Iterator",
    r"\bAsync(Client|Connection)\b": r"\1",
    r"\basync_connection\b": "connection",
    r"\bAsyncBaseTransport\b": "BaseTransport",
    r"\b__a(enter|exit)__\b": r"__\1__",
    r"\baclose\b": "close",
}


def derived(source: Path) -> str:
    """Formatted, as it should lie in DERIVED."""
    text = source.read_text(encoding="utf-8")
    for pattern, word in WORDS.items():
        text = re.sub(pattern, word, text)
    [name] = re.findall(r"^class (Async\w+)", source.read_text(encoding="utf-8"), re.MULTILINE)
    text = re.sub(r'^""".*?"""\n', PROMISE.format(name, source.name), text, count=1, flags=re.DOTALL)
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
        str(next(iter(DERIVED))),
        "-",
    ]
    return subprocess.run(call, input=text, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603


if __name__ == "__main__":
    for target, source in DERIVED.items():
        target.write_text(derived(source), encoding="utf-8")
