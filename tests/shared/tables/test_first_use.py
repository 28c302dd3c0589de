"""Loops are compiled before anybody waits for them, and again when any file that they come from has
changed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equipment.replaced import replaced
from trireme_shared.tables.kernels import parts

TABLES = Path(parts.__file__).parents[1]
LOOP = """
from trireme_shared.tables.kernels.parts import compiled


@compiled
def one_more(number):
    return number + 1
"""
LACKING = """
from trireme_shared.tables.first_use import compile_loops
from trireme_shared.tables.kernels import cells, rows

compile_loops()
print([name for name in {names} if not eval(name).signatures])
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_all_loops_that_tables_call_are_there_after_the_first_use():
    found = {
        call
        for path in TABLES.glob("*.py")
        for call in re.findall(r"\b(cell|row)_loops\.(\w+)\(", path.read_text())
    }
    names = [f"{module}s.{name}" for module, name in sorted(found)]
    assert len(names) > 15
    told = subprocess.run(
        [sys.executable, "-c", LACKING.format(names=names)],
        cwd=TABLES.parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert told.stdout == "[]\n", told.stderr


READ_ONLY = """
import numpy as np
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.first_use import DIM, IDS, SLOTS, compile_loops
from trireme_shared.tables.kernels import cells, rows
from trireme_shared.tables.table import Table

compile_loops()
named = {**vars(cells), **vars(rows)}
loops = {name: loop for name, loop in named.items() if hasattr(loop, "stats")}
before = {name: len(loop.signatures) for name, loop in loops.items()}
ids = np.frombuffer(np.arange(IDS).tobytes(), np.int64)
adam, uniform = RowOptimizer(kind="adam", lr=0.1), RowInit(kind="uniform", scale=0.1)
spec = TableSpec(name="read", dim=DIM, seed=0, optimizer=adam, init=uniform)
Table(spec, SLOTS).lookup(ids, np.empty((IDS, DIM), np.float32))
print([name for name, loop in loops.items() if len(loop.signatures) != before[name]])
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_ids_of_a_payload_that_cannot_be_written_have_no_loops_of_their_own():
    """The first lookup of such ids kept the interpreter for as long as compiling took: a lease was over."""
    told = subprocess.run(
        [sys.executable, "-c", READ_ONLY], cwd=TABLES.parents[2], capture_output=True, text=True, timeout=200
    )
    assert told.stdout == "[]\n", told.stderr or told.stdout


def test_what_was_compiled_from_other_sources_is_not_used(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)

    def stats():
        spec = importlib.util.spec_from_file_location("loop", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.one_more(1) == 2
        return sum(module.one_more.stats.cache_hits.values()), sum(
            module.one_more.stats.cache_misses.values()
        )

    assert [stats(), stats()] == [(0, 1), (1, 0)]
    with replaced(parts, "STAMP", "of other sources"):
        assert stats() == (0, 1)
