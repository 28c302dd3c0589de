"""docs/security.md: what stops each threat has a test, and that test exists."""

from __future__ import annotations

import re

from tests.tidy.sources import ROOT, tree_of

NAMED = re.compile(r"`(?P<file>(?:[\w/]+/)?test_\w+\.py|…)(?:::(?P<test>test_\w+))?`")
HEADS = ("who can try what", "who", "role", "---")


def test_every_threat_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    threats = page[page.index("## HTTP and the data plane") :]
    rows = [
        line
        for line in threats.splitlines()
        if line.startswith("|") and not line[1:].strip().startswith(HEADS)
    ]
    assert len(rows) >= 20
    files: dict[str, str] = {}  # by their names alone, as later lines give them
    last = ""
    for row in rows:
        cell = row.rsplit("|", 2)[1]
        assert NAMED.search(cell) or cell.strip() in ("the same", "as the first two lines"), row
        for found in NAMED.finditer(cell):
            last = last if found["file"] == "…" else files.get(found["file"], found["file"])
            files[last.rpartition("/")[2]] = last
            names = {node.name for node in tree_of(ROOT / last).body if hasattr(node, "name")}
            assert found["test"] is None or found["test"] in names, f"{last} has no {found['test']}"
