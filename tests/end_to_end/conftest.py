from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import Command, command_in


@pytest.fixture
def trireme(tmp_path: Path) -> Iterator[Command]:
    with command_in(tmp_path) as command:
        yield command
