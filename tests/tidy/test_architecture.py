"""ARCHITECTURE.md names the tree as it is: its tables have every room once, and every path in it exists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tidy.sources import PACKAGES, ROOT, folder_of

PAGES = ("ARCHITECTURE.md", "docs/mechanisms.md")
PACKAGE_FOLDERS = [str(folder_of(package).relative_to(ROOT)) for package in PACKAGES]
TITLE = re.compile(r"#+ `([\w/]+)/`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
# neither keys of etcd nor URLs end like that
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|json)|/))`")


class Row(NamedTuple):
    """One row of a table of rooms. `line`: from 1; `package`: the folder in the table's title; `rooms`: paths
    below it."""

    line: int
    package: str
    rooms: tuple[str, ...]


def rows_in(text: str) -> Iterator[Row]:
    """The rows of all tables below a title that is the path of a folder."""
    package = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            package = title[1] if (title := TITLE.match(line)) else ""
        elif package and line.startswith("| `"):
            yield Row(number, package, tuple(re.findall("`([^`]+)`", line.split("|")[1])))


def rooms_of(folder: Path) -> set[str]:
    """What must have a row: each module beside the folders of a package, and each folder below it that has
    modules."""
    modules = {path.name for path in folder.glob("*.py") if path.name != "__init__.py"}
    folders = {path.parent.relative_to(folder) for path in folder.rglob("*.py")} - {Path()}
    return modules | {f"{path.as_posix()}/" for path in folders}


def wrong_rows(text: str, packages: dict[str, set[str]]) -> list[str]:
    """What differs between the tables of `text` and `packages`: by the folder of each, the rooms that it
    has."""
    wrong, counts = [], {package: Counter[str]() for package in packages}
    for row in rows_in(text):
        for room in row.rooms:
            if room not in packages.get(row.package, ()):
                wrong.append(f"line {row.line}: {row.package}/ has no {room}: take it out of the row")
            else:
                counts[row.package][room] += 1
    return wrong + [
        f"{package}/{room} stands in {count} rows of the table of {package}/: name it in one"
        for package, rooms in packages.items()
        for room in sorted(rooms)
        if (count := counts[package][room]) != 1
    ]


def missing_paths(text: str, page: Path) -> list[str]:
    """Paths in `text`, the text of `page`, that lead nowhere. In a table of rooms they begin below its
    title's folder too, elsewhere below the repository or any package; links begin at the page's folder."""
    packages, missing, fenced = {row.line: row.package for row in rows_in(text)}, [], False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if fenced:
            continue
        starts = [ROOT, *(ROOT / folder for folder in PACKAGE_FOLDERS)]
        if number in packages:
            starts = [ROOT, ROOT / packages[number]]
        paths = chain(
            ((path, starts) for path in PATH.findall(line)),
            ((path, [page.parent]) for path in LINK.findall(line)),
        )
        missing += [
            f"line {number}: {path} is nowhere: name the file or folder that took its place"
            for path, below in paths
            if not any((start / path).exists() for start in below)
        ]
    return missing


def test_every_room_stands_in_one_row():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    wrong = wrong_rows(text, {folder: rooms_of(ROOT / folder) for folder in PACKAGE_FOLDERS})
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    missing = missing_paths((ROOT / page).read_text(encoding="utf-8"), ROOT / page)
    assert not missing, f"{page}\n" + "\n".join(missing)


SMALL = """
### `pserver_service/`
| room | what it is for |
|---|---|
| `member.py`, `gone.py` | its life, with `context.py` and `older.py` |
| `checkpoints/`, `member.py` | see `pserver_service/checkpoints/copies.py` and [docs](docs/none.md#part) |

## Words
| `handoff/` | no row of the table above |
"""


def test_wrong_rows_are_found():
    found = wrong_rows(SMALL, {"pserver_service": {"member.py", "checkpoints/", "handoff/"}})
    assert [each.split(":")[0] for each in found] == [
        "line 5",  # gone.py
        "pserver_service/handoff/ stands in 0 rows of the table of pserver_service/",
        "pserver_service/member.py stands in 2 rows of the table of pserver_service/",
    ]
    assert "pserver_service/ has no gone.py" in found[0]


def test_paths_that_lead_nowhere_are_found():
    found = missing_paths(SMALL, ROOT / "ARCHITECTURE.md")
    assert [each.split(" is nowhere")[0] for each in found] == [
        "line 5: gone.py",
        "line 5: older.py",
        "line 6: docs/none.md",
    ]


def test_rooms_are_modules_beside_folders_and_folders_with_modules(tmp_path):
    for path in ("__init__.py", "member.py", "core/queue/tasks.py", "built/app.js"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert rooms_of(tmp_path) == {"member.py", "core/queue/"}


def test_documents_name_files_that_are_there():
    """DECISIONS.md and CHANGELOG.md tell of what was, too."""
    documents = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]
    named = re.compile(
        r"`((?:master_service|pserver_service|trainer_agent|trireme|shared|tests|benchmarks)/[\w/.-]+\.py)"
    )
    gone = [
        f"{document.relative_to(ROOT)}: {path}"
        for document in documents
        for path in named.findall(document.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not gone, "\n".join(gone)
