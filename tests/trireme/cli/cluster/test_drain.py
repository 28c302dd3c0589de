"""`trireme pool drain` waits until nothing runs there, whoever leads meanwhile."""

from __future__ import annotations

import pytest

from trireme.cli.cluster.jobs import drain
from trireme.client import AsyncClient
from trireme_shared.protocol.errors import NotLeader, NotReady, PeerError
from trireme_shared.protocol.rest_cluster import PoolMemberView

DRAINING = PoolMemberView(member_id="gpu-7", kind="trainer", host="h", agent="gpu", state="draining", job="a")
DRAINED = DRAINING.model_copy(update={"state": "drained", "job": ""})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[PoolMemberView | PeerError]:
    """What leaders answer, one after the other; the last one again and again."""
    said: list[PoolMemberView | PeerError] = []

    async def drain_pool_member(_: AsyncClient, member: str) -> PoolMemberView:
        assert member == "gpu-7"
        now = said.pop(0) if len(said) > 1 else said[0]
        if isinstance(now, PeerError):
            raise now
        return now

    monkeypatch.setattr(AsyncClient, "drain_pool_member", drain_pool_member)
    return said


def test_it_goes_on_with_the_next_leader_from_the_first_call_on(answers, capsys) -> None:
    answers += [NotReady("it takes the cluster over"), DRAINING, NotLeader("it stands by"), DRAINED]
    assert drain("gpu-7", 30.0, None, "http://m1", as_json=False) == 0
    assert "gpu-7 is drained; `trireme pool undrain gpu-7` takes it back" in capsys.readouterr().out
    assert answers == [DRAINED]


def test_without_a_leader_it_ends_after_its_time_and_says_for_what_it_waited(answers, capsys) -> None:
    answers.append(NotLeader("it stands by"))
    assert drain("gpu-7", 0.5, None, "http://m1", as_json=False) != 0
    assert "for a master to lead the cluster: it stands by" in capsys.readouterr().err


def test_a_member_that_stays_busy_is_told_after_the_time(answers, capsys) -> None:
    answers.append(DRAINING)
    assert drain("gpu-7", 0.5, None, "http://m1", as_json=False) != 0
    assert "gpu-7 is still draining 0.5 s after it was drained: it runs job a" in capsys.readouterr().err


def test_nobody_waits_if_nobody_wants_to(answers, capsys) -> None:
    answers.append(DRAINING)
    assert drain("gpu-7", 0.0, None, "http://m1", as_json=False) == 0
    assert "gpu-7 is draining: it leaves job a" in capsys.readouterr().out
