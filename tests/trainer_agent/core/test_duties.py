"""What a trainer has to do now."""

from __future__ import annotations

from trainer_agent.core.duties import Duty, Next, next_duty
from trireme_shared.protocol.records import JobState, Mode, Phase, Stage, TrainerList

RUNNING = JobState(phase=Phase.RUNNING, generation=4)


TRAINERS = TrainerList(generation=4, lanes=3, names=("first", "me", "last", "spare"))


def duty_of(state, trainers=TRAINERS, trainer="me", mode=Mode.SYNC):
    return next_duty(state, trainers, trainer, mode)


def test_a_trainer_with_lanes_trains_them_in_the_generation_of_state_and_lanes():
    assert duty_of(RUNNING) == Next(Duty.TRAIN, "", 4, (1, 2))


def test_a_trainer_waits_while_state_and_lanes_speak_of_different_generations():
    assert duty_of(RUNNING.model_copy(update={"generation": 5})) == Next(
        Duty.WAIT, "the lanes of generation 5"
    )


def test_a_trainer_without_lanes_is_a_hot_spare_and_waits():
    assert duty_of(RUNNING, trainer="spare") == Next(Duty.WAIT, "a lane (this trainer is a hot spare)", 4)


def test_async_trainers_need_no_lanes_but_must_be_counted_in():
    assert duty_of(RUNNING, mode=Mode.ASYNC) == Next(Duty.TRAIN, "", 4)
    assert duty_of(RUNNING, trainer="new", mode=Mode.ASYNC).duty is Duty.WAIT


def test_duty_follows_the_stage_and_the_phase():
    assert duty_of(None).duty is Duty.WAIT
    assert duty_of(JobState()).duty is Duty.WAIT
    assert duty_of(RUNNING.model_copy(update={"stage": Stage.EVALUATE})).duty is Duty.FINISH
    for phase in (Phase.COMPLETED, Phase.FAILED):
        assert duty_of(RUNNING.model_copy(update={"phase": phase})).duty is Duty.LEAVE
