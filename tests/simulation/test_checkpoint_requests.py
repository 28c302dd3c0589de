"""Many requests for checkpoints at once: each gets one that was begun after it (operator_requests.py checks
that)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.simulation.plans import OperatorRequest, Plan, RequestKind, plan_of
from tests.simulation.run import simulate
from trireme_shared.protocol.records import Dispatch, Mode
from trireme_shared.protocol.records.operations import OperationState


def crowded(seed: int, mode: Mode, dispatch: Dispatch) -> Plan:
    """The plan of that seed with ten requests in pairs: the second may come while the checkpoint of the first
    is made."""
    plan, rng = plan_of(seed, mode, dispatch), random.Random(f"crowd-{seed}")
    first = [rng.uniform(0.5, plan.window_s) for _ in range(5)]
    times = sorted([*first, *(at + rng.uniform(0.0, 1.0) for at in first)])
    asked = tuple(OperatorRequest(at, RequestKind.CHECKPOINT) for at in times)
    return replace(plan, independent=False, requests=asked)


@pytest.mark.parametrize(
    ("mode", "dispatch"),
    [(Mode.SYNC, Dispatch.MASTER), (Mode.ASYNC, Dispatch.MASTER), (Mode.SYNC, Dispatch.ETCD)],
    ids=["sync", "async", "masterless"],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_checkpoint_is_older_than_its_request(seed: int, mode: Mode, dispatch: Dispatch) -> None:
    outcome = simulate(seed, mode, plan=crowded(seed, mode, dispatch), dispatch=dispatch)
    assert not outcome.violations, str(outcome)
    assert any(operation.state is OperationState.DONE for operation in outcome.operations)
