"""Asynchronous: the options of the optimizer for each push, of which a trainer makes only some.

this trainer's push N: states that parameter servers keep ─► the newest one up to N ─► the scheduler's steps up to N ─► options
each STATE_EVERY pushes a push takes the scheduler's state to the parameter servers
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from trainer_agent.model.compute import BeforeStep, Compute
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.core.asynchronous import STATE_EVERY, newest_at

STEPS_AT_ONCE = 1000  # of a scheduler, until the trainer looks what else is to do


class PushSchedule:
    """`compute`: its scheduler is as before any step. `known`: states that other trainers' pushes brought."""

    def __init__(self, compute: Compute, known: Iterable[LaneZero] = ()) -> None:
        self._compute, self._known = compute, tuple(known)
        self._begun, self._options = -1, LaneZero(options=())

    def __repr__(self) -> str:
        return f"<PushSchedule at push {self._begun}>"

    async def options_of(self, number: int) -> LaneZero:
        """For the push with that number (or of that epoch). The schedule only goes forward: a lower number gets the latest options. With the
        scheduler's state if parameter servers are to keep it."""
        if (known := newest_at(self._known, number)) is not None:
            self._compute.restore(known)
            self._begun, self._options = known.number, LaneZero(options=known.options)
        self._known, told = (), self._begun
        while self._begun < number:
            before = BeforeStep(epoch_ended=self._begun >= 0, is_own=self._begun + 1 == number)
            state = self._compute.begin_step(before)
            self._begun += 1
            if self._begun == number:
                self._options = LaneZero(options=state.options)
                if told // STATE_EVERY < number // STATE_EVERY:
                    return state.with_fields(number=number)
            elif self._begun % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return self._options
