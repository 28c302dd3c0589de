"""A script with the modules beside it that it imports, as it is sent with a job.

train.py ──import prepare──► prepare.py ──from features import text──► features/ (the whole package)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from trireme_shared.datasets.user_modules import OURS
from trireme_shared.platform.membership.local_script import MAX_FILES, digest_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.cluster import Source
from trireme_shared.protocol.records.record import misfits


def read_source(script: Path, modules: Iterable[str] = ()) -> Source:
    """What is imported by name from the script's folder; imports that are computed are not seen. `modules`:
    taken, too, if they lie there. Raises InvalidArgument."""
    folder, found = script.resolve().parent, dict[Path, str]()
    ours = _ours_in(folder)
    todo = [script.resolve(), *(path for name in modules for path in _beside(folder, name.partition(".")[0]))]
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = _text(path)
            todo += [
                other for name in set(_imported(path, found[path])) - ours for other in _beside(folder, name)
            ]
    text = found.pop(script.resolve())
    modules = {path.relative_to(folder).as_posix(): found[path] for path in sorted(found)}
    try:
        return Source(file_name=script.name, text=text, modules=modules)
    except ValidationError as error:
        msg = f"{script} cannot be sent with a job: {misfits(error)}"
        raise InvalidArgument(
            msg, hint="give a path or URL that all members can read as the script"
        ) from error


def digests_of(script: Path, modules: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of the same files, by their path below the script's folder; of the first MAX_FILES. What cannot
    be read or parsed is left out: its import fails anyway, or needs more than a file. Raises OSError for the
    script."""
    script = script.resolve()
    folder, found = script.parent, {script.name: digest_of(script)}
    ours = _ours_in(folder)
    todo = [script, *(path for name in modules for path in _modules_beside(folder, name.partition(".")[0]))]
    seen = set(todo)
    while todo and len(found) < MAX_FILES:
        path = todo.pop(0)
        try:
            names = set(_imported(path, path.read_text(encoding="utf-8"))) - ours
            found[path.relative_to(folder).as_posix()] = digest_of(path)
        except (OSError, ValueError, InvalidArgument):  # a link to elsewhere, too
            continue
        more = {other for name in names for other in _modules_beside(folder, name)} - seen
        seen |= more
        todo += sorted(more)
    return found


def _ours_in(folder: Path) -> set[str]:
    """The names that are our packages' for a script of this folder, since every member has those. Where no
    folder trireme/ lies beside the script, the folder is no checkout of Trireme, and a module
    `master_service` in it is the user's."""
    return set(OURS) if (folder / "trireme").is_dir() else {"trireme"}


def _modules_beside(folder: Path, name: str) -> list[Path]:
    """As `_beside`, but only of a package with an __init__.py, and not all of a large one: a folder of data
    may have the name of an installed package."""
    if (folder / name / "__init__.py").is_file():
        return [path.resolve() for path in islice((folder / name).rglob("*.py"), MAX_FILES)]
    module = folder / f"{name}.py"
    return [module.resolve()] if module.is_file() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be sent with the job: {error}") from error


def _imported(path: Path, text: str) -> Iterator[str]:
    """The first parts of the names that a module imports. A relative import is of its own package, which is
    taken as a whole."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InvalidArgument(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _beside(folder: Path, name: str) -> list[Path]:
    """The files of the module or package of that name in the script's folder."""
    if (folder / name).is_dir():
        return sorted(path.resolve() for path in (folder / name).rglob("*.py"))
    module = folder / f"{name}.py"
    return [module.resolve()] if module.is_file() else []
