"""No object gets its behaviour from outside after it was made: functions and bound methods are given at
construction.

A reader of `server.stepped()` finds what that does in the class of `server`. With `server.on_step =
other.wake` somewhere else, nobody finds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy import sources
from tests.tidy.sources import nodes_of, tree_of

# places that remain, as "file: target"; this list may only shrink
EXCEPTIONS = {
    "trireme/cli/run.py: interrupt.say",
}

STANDARD = {
    "set",
    "clear",
    "append",
    "add",
    "put_nowait",
    "notify",
    "notify_all",
    "cancel",
    "close",
    "join",
}  # methods that are handed around


def methods_and_values() -> tuple[set[str], set[str]]:
    """Names that our classes define as methods, and as attributes or properties."""
    methods, values = set[str](), set[str]()
    for path in sources.MODULES.values():
        for node in nodes_of(path):
            match node:
                case ast.ClassDef():
                    for part in node.body:
                        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                            (values if is_property(part) else methods).add(part.name)
                        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                            values.add(part.target.id)
                case ast.Attribute(ctx=ast.Store(), attr=attr, value=ast.Name(id="self")):
                    values.add(attr)
    return methods, values


def callable_attributes() -> set[str]:
    """Names of attributes that some class of ours declares as a callable, also by an alias."""
    declared = [
        (ast.unparse(node.target).removeprefix("self."), ast.unparse(node.annotation))
        for path in sources.SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.AnnAssign)
    ]
    aliases = {
        ast.unparse(node.targets[0])
        for path in sources.SOURCES
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
    }
    aliases |= {name for name, kind in declared if kind == "TypeAlias"}
    return {name for name, kind in declared if kind.startswith("Callable[") or kind in aliases}


def is_property(part: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in part.decorator_list)


def functions_of(path: Path) -> set[str]:
    """Names of functions that a module defines, at any depth but in classes, or imports from our modules."""
    inside = {id(part) for node in nodes_of(path) if isinstance(node, ast.ClassDef) for part in node.body}
    found = {
        node.name
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in inside
    }
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (theirs := sources.MODULES.get(str(node.module))) is not None:
            own = {
                each.name
                for each in tree_of(theirs).body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            found |= {alias.asname or alias.name for alias in node.names if alias.name in own}
    return found


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment of a statement."""
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from _paired(target, node.value)
        case ast.AnnAssign(value=ast.expr() as value):
            yield node.target, value


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _paired(one, other)
    else:
        yield target, value


def assigned_callables() -> set[str]:
    (methods, values), callables, found = methods_and_values(), callable_attributes(), set[str]()
    for path in sources.SOURCES:
        functions = functions_of(path)
        for node in nodes_of(path):
            for target, value in pairs(node):
                if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in {"self", "cls"}:
                    continue
                sure = methods if target.attr in callables else methods - values
                if is_callable(value, functions, sure):
                    found.add(f"{path.relative_to(sources.ROOT)}: {ast.unparse(target)}")
    return found


def is_callable(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(attr=attr):
            return attr in methods or attr in STANDARD
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial")):
            return True
        case ast.IfExp():
            return is_callable(value.body, functions, methods) or is_callable(
                value.orelse, functions, methods
            )
        case ast.BoolOp():
            return any(is_callable(each, functions, methods) for each in value.values)
        case _:
            return False


TODAY = """
class Server:
    def __init__(self):
        self.on_step = None
        self.fits: Callable[[int], bool] = lambda _: True

    def begin(self): ...

    def refused(self): ...

class Answer:
    refused: int

def later(): ...

class Member:
    def __init__(self, server, moving, event):
        self.own = later
        server.on_step, server.on_moving = event.set, lambda: None
        server.step_rows = self.begin
        self._server.fits = moving.refused
        server.wake = later
        server.soon = partial(later, 1)
        server.count = moving.refused
        server.on_step = None
"""


def test_each_kind_of_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`refused` is a method of one class and a number in another: it counts where the attribute is declared
    as a callable."""
    path = tmp_path / "shared" / "member.py"
    path.parent.mkdir()
    path.write_text(TODAY)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "SOURCES", [path])
    monkeypatch.setattr(sources, "MODULES", {"shared.member": path})
    targets = (
        "server.on_step",
        "server.on_moving",
        "server.step_rows",
        "self._server.fits",
        "server.wake",
        "server.soon",
    )
    assert assigned_callables() == {f"shared/member.py: {target}" for target in targets}


def test_no_object_is_given_a_callable_after_it_was_made() -> None:
    found = assigned_callables()
    assert found - EXCEPTIONS == set(), "give it at construction"
    assert EXCEPTIONS - found == set(), "these are gone: take them off the list"
