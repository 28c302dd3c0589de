"""A probe of a job lets errors of its block out as they are: commands print them and choose their exit
codes."""

from __future__ import annotations

import json

import pytest

from trireme.cli.chaos import JobProbe
from trireme.launch.run_folder import RUN_FILE
from trireme_shared.platform.etcd.embedded import free_ports
from trireme_shared.protocol.errors import NotFound


async def test_an_error_inside_a_probe_is_not_wrapped(tmp_path):
    facts = {"job": "away", "url": "http://127.0.0.1:1", "etcd": f"http://127.0.0.1:{free_ports(1)[0]}"}
    (tmp_path / RUN_FILE).write_text(json.dumps(facts))
    with pytest.raises(NotFound, match="trainer-0 ended"):
        async with JobProbe(tmp_path):
            raise NotFound("trainer-0 ended by itself")
