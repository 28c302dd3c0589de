"""Schedules as JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_agent.model import optimizer as optimizers
from trireme_shared.protocol.errors import InvalidArgument


def test_a_schedule_is_handed_over_as_json(build):
    import json

    from trireme_shared.protocol.records.step import LaneZero

    for text in (
        "torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], 0.5)",
        "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=40)",
        "torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)",
        "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)",
    ):
        one, other = (build(scheduler=f"def scheduler(optimizer):\n    return {text}\n") for _ in range(2))
        for _ in range(4):
            handed = one.begin_step()
        other.restore(LaneZero.model_validate(json.loads(handed.model_dump_json())))
        assert [one.begin_step() for _ in range(5)] == [other.begin_step() for _ in range(5)], text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.dictionaries(st.integers(), st.integers(1, 5)).map(__import__("collections").Counter)
        ),
        max_leaves=12,
    )
)
def test_scheduler_state_survives_json(state):
    import json

    assert optimizers.decode(json.loads(json.dumps(optimizers.encode(state)))) == state


def test_a_state_that_cannot_travel_is_refused_when_the_model_is_built(build):
    with pytest.raises(InvalidArgument, match="the scheduler's state holds object"):
        build(
            scheduler="""
            class Odd(torch.optim.lr_scheduler.StepLR):
                def state_dict(self):
                    return {"odd": object()}

            def scheduler(optimizer):
                return Odd(optimizer, 1)
            """
        )
