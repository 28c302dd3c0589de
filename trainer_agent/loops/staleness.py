"""Bounded staleness of an asynchronous trainer: before a minibatch it waits while a live trainer computes with much older parameters.

pull, once the bound holds ─► computes ─► push: computes no more with them ─► pull ...       (pull_every above 1: the pushes between keep them)

A parameter server counts a trainer from its pull to its push, so a trainer that waits, pauses, evaluates or has no task is waited for by nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_agent.data_plane.parameter_servers import ParameterServers
from trainer_agent.data_plane.pulls import Within
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import PeerError, StaleGeneration
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.wire.messages import StalenessBound

PATIENCE = 0.5  # of a task's time limits: who waits gets no limit of its own into danger

log = telemetry.logger("staleness")


class BoundedStaleness:
    """Of one trainer. `computes`: parameter servers count it as one that computes with the parameters that it has. `is_needed`: whether it is still to
    train; asked while it waits. `has_waited`: in its last pull."""

    def __init__(self, spec: JobSpec, trainer: str, servers: ParameterServers, is_needed: Callable[[], bool]) -> None:
        self._bound: StalenessBound | None = None
        if spec.max_staleness is not None:
            self._bound = StalenessBound(
                trainer=trainer,
                versions=spec.max_staleness,
                floor_s=PATIENCE * spec.task_timeout_floor_s,
                ceiling_s=PATIENCE * spec.task_timeout_ceiling_s,
            )
        self._servers, self._is_needed, self._pull_every = servers, is_needed, spec.pull_every
        self._within: Within | None = None
        self.computes = self.has_waited = False

    def __repr__(self) -> str:
        return f"<BoundedStaleness {self._bound!r}, {'computes' if self.computes else 'does not compute'}>"

    @property
    def is_on(self) -> bool:
        return self._bound is not None

    @property
    def is_due(self) -> bool:
        """Whether it has to pull before it computes."""
        return self._bound is not None and not self.computes

    def keeps(self, unpulled: int, *, is_last: bool) -> bool:
        """Whether it computes with the same parameters after a push. `unpulled`: minibatches since the pull, with those of the push; `is_last`: of its task."""
        return self.is_on and not is_last and unpulled < self._pull_every

    async def pull(self, skip_after_s: float | None = None) -> None:
        """Once no live trainer computes with much older parameters; then it computes. Raises Abandoned, Gone, InvalidArgument."""
        assert self._bound is not None
        within = self._within = Within(self._bound, self._is_needed)
        try:
            await self._servers.pull_within(within, skip_after_s)
        finally:
            self.computes, self.has_waited, self._within = True, within.waited, None  # also if it is not known

    @property
    def waits_for(self) -> str:
        """As a sentence; "": it does not wait."""
        return "" if self._within is None else self._within.waits_for

    async def let_go(self) -> None:
        """It has no more use for its parameters, without a push that says so. If nobody hears it, others wait until their patience ends."""
        if not self.computes or self._bound is None:
            return
        self.computes = False
        try:
            await self._servers.pulls.let_go(self._bound)
        except (PeerError, StaleGeneration) as error:
            log.info("not_let_go", cause=error.message)
