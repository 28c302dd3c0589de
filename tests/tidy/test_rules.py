"""The rules of test_layout.py can fail: each is shown a layout that breaks it."""

from __future__ import annotations

import pytest

from tests.tidy import sources
from tests.tidy.sources import circles


def test_a_circle_is_found_and_a_chain_is_none():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_two_circles_are_told_apart():
    found = circles({"a": {"b"}, "b": {"a", "x"}, "x": {"y"}, "y": {"x"}})
    assert sorted(found) == [["a", "b"], ["x", "y"]]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Write a package `trireme_shared` and have it read as the sources."""

    def write(**files: str):
        for name, text in files.items():
            path = tmp_path / "shared" / "trireme_shared" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(sources, "ROOT", tmp_path)
        found = {sources.module_of(path): path for path in sorted(tmp_path.rglob("*.py"))}
        monkeypatch.setattr(sources, "MODULES", found)
        return found

    return write


def test_imports_for_types_only_and_inside_functions_are_arrows(tree):
    found = tree(
        a__one="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trireme_shared.b import two\n",
        b__two="def late():\n    from trireme_shared.a.one import something\n",
    )
    graph = {module: sources.arrows(path) for module, path in found.items()}
    assert graph == {
        "trireme_shared.a.one": {"trireme_shared.b.two"},
        "trireme_shared.b.two": {"trireme_shared.a.one"},
    }
    assert circles(graph) == [["trireme_shared.a.one", "trireme_shared.b.two"]]
