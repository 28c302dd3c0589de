"""The sources, and what each imports, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("master_service", "pserver_service", "trainer_agent")
PACKAGES = (*SERVICES, "trireme_shared", "trireme")


def folder_of(package: str) -> Path:
    """The package trireme_shared lies in the folder shared/, each other package in a folder of its own
    name."""
    return ROOT / "shared" / package if package == "trireme_shared" else ROOT / package


def parts_of(path: Path) -> tuple[str, ...]:
    """The folders and the file of a path below the folder that is on sys.path: the first one is the
    package."""
    parts = path.relative_to(ROOT).parts
    return parts[1:] if parts[:2] == ("shared", "trireme_shared") else parts


SOURCES = sorted(path for package in PACKAGES for path in folder_of(package).rglob("*.py"))
EVERYTHING = [
    *SOURCES,
    *sorted(
        path
        for folder in ("tests", "examples", "benchmarks", "clients", "docker")
        for path in (ROOT / folder).rglob("*.py")
    ),
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """`shared/trireme_shared/platform/etcd/fenced.py` is trireme_shared.platform.etcd.fenced,
    `shared/trireme_shared/platform/etcd/__init__.py` is trireme_shared.platform.etcd."""
    parts = parts_of(path.with_suffix(""))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Of its syntax tree; walking it costs more than parsing, and two dozen rules look at every file."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """(dotted module, line) of every import of a file, type-only ones too; `from a import b` gives both a and
    a.b."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            assert node.module
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def arrows(path: Path) -> set[str]:
    """Our own modules that a file imports. `from trireme_shared.protocol.wire import codec` is an arrow to
    trireme_shared.protocol.wire.codec alone."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & set(MODULES)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one node, each sorted (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        path.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in path:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = path[path.index(node) :]
            del path[path.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
