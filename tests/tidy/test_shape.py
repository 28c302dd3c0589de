"""The shape of classes and lines: what a reader has to hold in the head at once (ARCHITECTURE.md).

Exceptions stand here by name; the lists may only shrink.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy import sources
from tests.tidy.sources import nodes_of, tree_of

MAX_DEPTH = 2
MAX_ARGUMENTS = 8
MAX_COLUMNS = 110

# comments for tools at the end of a line: ruff and mypy want them there, so they are not counted
PRAGMAS = re.compile(r"(\s+# (noqa(: [A-Z]+\d+(, [A-Z]+\d+)*)?|type: ignore(\[[\w, -]+\])?|fmt: skip))+$")

DEEP = {  # "file: class"
    "trireme/containers/secrets.py: TokenVolumes",
    "trireme/pool/ray_pool.py: RayPool",
}
MANY_ARGUMENTS = {
    "trireme/communicator.py: CollectiveCommunicator",  # keywords of a public API
}


def where(path: Path) -> str:
    return str(path.relative_to(sources.ROOT))


def many_arguments() -> list[str]:
    """Classes whose `__init__` takes more than MAX_ARGUMENTS beside self. Fields of dataclasses and records
    have names where they are given, so they are not counted."""
    return [
        f"{where(path)}: {made.name} takes {count}"
        for path in sources.MODULES.values()
        for made in nodes_of(path)
        if isinstance(made, ast.ClassDef)
        for method in made.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if (count := len(method.args.args) + len(method.args.kwonlyargs) - 1) > MAX_ARGUMENTS
        if f"{where(path)}: {made.name}" not in MANY_ARGUMENTS
    ]


def deep_classes() -> list[str]:
    """Classes of ours that stand on more than MAX_DEPTH - 1 others of ours. Protocols, errors and records
    (values without behaviour of their own) are not counted."""
    bases: dict[str, tuple[str, list[str]]] = {}
    for path in sources.MODULES.values():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                bases[node.name] = (where(path), names)

    def storeys(name: str) -> int:
        _, above = bases[name]
        if name in {"Record", "TriremeError"} or "Protocol" in above or "Exception" in above:
            return 0
        return 1 + max((storeys(base) for base in above if base in bases and base != name), default=0)

    return [
        f"{place}: {name} is {depth} deep"
        for name, (place, _) in sorted(bases.items())
        if (depth := storeys(name)) > MAX_DEPTH
        and not _is_value(name, bases)
        and f"{place}: {name}" not in DEEP
    ]


def _is_value(name: str, bases: dict[str, tuple[str, list[str]]]) -> bool:
    if name in {"Record", "TriremeError", "BaseModel", "Exception"} or name.endswith("Error"):
        return True
    return name in bases and any(_is_value(base, bases) for base in bases[name][1] if base != name)


def long_lines() -> list[str]:
    """Lines of more than MAX_COLUMNS characters: code, comments, docstrings and diagrams alike."""
    return [
        f"{where(path)}:{number} has {count} columns"
        for path in sources.EVERYTHING
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > MAX_COLUMNS and (count := len(PRAGMAS.sub("", line))) > MAX_COLUMNS
    ]


def test_lines_are_short():
    assert not long_lines(), "\n".join(long_lines())


def test_constructors_take_few_arguments():
    assert not many_arguments(), "\n".join(many_arguments())


def test_classes_are_at_most_two_deep():
    assert not deep_classes(), "\n".join(deep_classes())


def test_exceptions_are_still_needed():
    listed = {name.split(": ")[0] for name in (*DEEP, *MANY_ARGUMENTS)}
    assert not [name for name in listed if not (sources.ROOT / name).exists()]


def test_a_constructor_with_nine_arguments_is_found(tmp_path, monkeypatch):
    eight = "class Eight:\n    def __init__(self, a, b, c, d, *, e, f, g, h): ...\n"
    nine = "class Nine:\n    def __init__(self, a, b, c, d, *, e, f, g, h, i): ...\n"
    _read(tmp_path, monkeypatch, eight + nine)
    assert many_arguments() == ["one.py: Nine takes 9"]


def test_a_class_on_two_others_is_found(tmp_path, monkeypatch):
    _read(
        tmp_path,
        monkeypatch,
        "class Port(Protocol): ...\nclass One(Port): ...\nclass Two(One): ...\nclass Three(Two): ...\n"
        "class TriremeError(Exception): ...\nclass A(TriremeError): ...\nclass B(A): ...\nclass C(B): ...\n",
    )
    assert deep_classes() == ["one.py: Three is 3 deep"]


def test_a_line_of_111_columns_is_found(tmp_path, monkeypatch):
    code, pragmas = "x = " + "1" * 106, "  # type: ignore[a, b]  # noqa: A001, B002  # fmt: skip"
    _read(tmp_path, monkeypatch, f"{code}\n{code}1\n{code}{pragmas}\n{code}  # noqa: A001  why\n")
    assert long_lines() == ["one.py:2 has 111 columns", "one.py:4 has 129 columns"]


def _read(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = folder / "one.py"
    path.write_text(text)
    monkeypatch.setattr(sources, "ROOT", folder)
    monkeypatch.setattr(sources, "MODULES", {"one": path})
    monkeypatch.setattr(sources, "EVERYTHING", [path])
    sources.nodes_of.cache_clear()
    sources.tree_of.cache_clear()
