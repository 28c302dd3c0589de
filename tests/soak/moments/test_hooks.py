"""The faults at moments of collective jobs find what they are hung on: else a trainer with one would end
before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.moments import hooks
from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import Group
from trainer_agent.collective.mean_blocks import Arriving
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.catching_up import CatchingUp
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.data_plane.pushes import Outbox

HUNG_ON = (Arriving, CatchingUp, CollectiveGroup, Group, MeanGradients, Outbox, Replica, StateGiver)


def test_a_trainer_with_a_fault_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TRIREME_NAME": "trainer-0", "MOMENTS": "0:1000:form:before:kill", "MARKS": str(tmp_path)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {kind: dict(vars(kind)) for kind in HUNG_ON}
    try:
        hooks.install()
        changed = [
            (kind, name) for kind, own in before.items() for name in own if vars(kind)[name] is not own[name]
        ]
    finally:
        for kind, own in before.items():
            for name, value in own.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)
    assert {kind for kind, _ in changed} == set(HUNG_ON)
