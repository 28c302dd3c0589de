"""The longest tests begin first, so that no process of `pytest -n` is left with one at the end. Files in
memory:// are gone after each test, users' modules as well, and logs go where they went before it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator

import fsspec
import pytest
import structlog

from tests.equipment.api_document import documents_made_once

FIRST = ("tests/soak/", "tests/end_to_end/", "tests/simulation/", "tests/pserver_service/checkpoints/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="where tests in a browser leave pictures of pages")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next(
            (number for number, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST)
        )

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects of modules and tests stay until the end: the collector does not look through
    them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def empty_memory_filesystem() -> Iterator[None]:
    yield
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def documents_of_the_api_are_made_once() -> Iterator[None]:
    with documents_made_once():
        yield


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that a test calls sends them to the captured stderr, which is closed after the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def users_modules_are_gone() -> Iterator[None]:
    """Users' modules, their folders on sys.path, and torch's threads are global to a process of `pytest
    -n`."""
    modules, path = set(sys.modules), list(sys.path)
    threads = torch.get_num_threads() if (torch := sys.modules.get("torch")) else None
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("script", "trireme_script", "user_")):
            del sys.modules[name]
    sys.path[:] = path
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)
