"""Copies of records with other fields are checked by mypy: nothing but `with_fields` makes them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT, SOURCES, nodes_of, where

UNCHECKED = (  # files and folders where `model_copy` may stand; the list may only shrink
    "shared/trireme_shared/protocol/records/record.py",  # with_fields itself
    # the names of fields come from callers, of any record
    "shared/trireme_shared/platform/membership/directory.py",
    "trireme/pool/registration.py",
    "shared/trireme_shared/protocol/records/setting_effects.py",  # the names of fields are a table
    "master_service/trackers/wandb_run.py",  # no record of ours
)

PROGRAM = """
from typing import Any, Literal, TypedDict
from trireme_shared.protocol.records.record import Record

class State(Record):
    phase: Literal["RUNNING", "FAILED"] = "RUNNING"
    generation: int = 0
    absent: tuple[int, ...] = ()

class Absence(TypedDict):
    absent: tuple[int, ...]

def change(state: State, absence: Absence, anything: dict[str, Any]) -> State:
    good = state.with_fields(phase="FAILED", generation=3, **absence)
    good.with_fields(WRONG)
    return good
"""


def test_copies_with_other_fields_are_made_by_with_fields():
    wrong = [
        f"{where(path, node.lineno)} calls model_copy: with_fields(name=value) is checked"
        for path in SOURCES
        if not str(path.relative_to(ROOT)).startswith(UNCHECKED)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr == "model_copy"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(120)
def test_mypy_finds_a_field_that_does_not_exist_one_of_another_type_and_a_mapping(tmp_path):
    wrong = {
        'phase="WAITS"': "incompatible type",
        'phas="FAILED"': "Unexpected keyword argument",
        "absent=[1]": "incompatible type",
        "**anything": "name the fields",
    }
    files = []
    for number, call in enumerate(wrong):
        files.append(tmp_path / f"program_{number}.py")
        files[-1].write_text(PROGRAM.replace("WRONG", call))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=110)
    said = done.stdout.splitlines()
    for file, message in zip(files, wrong.values(), strict=True):
        line = PROGRAM.splitlines().index("    good.with_fields(WRONG)") + 1
        own = [each for each in said if each.startswith(f"{file}:") and "error:" in each]
        assert own, done.stdout + done.stderr
        assert all(each.startswith(f"{file}:{line}:") and message in each for each in own), own
