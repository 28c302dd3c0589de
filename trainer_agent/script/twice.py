"""What a script computes first, computed twice: a job is refused whose result would depend on which trainer
computes what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer_agent.model.compute import LaneResult, Records
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.model.watch.own_state import Snapshot, Verdict, difference_of, judged, snapshot
from trainer_agent.model.watch.unshared_state import digest
from trireme_shared.datasets.user_modules import made_objects
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Mode

T = TypeVar("T")


class Twice:
    """`notices`: for the user, about what is not refused."""

    def __init__(self, script: Path, spec: JobSpec, compute: TorchCompute) -> None:
        self._script, self._spec, self._compute = script, spec, compute
        #: An asynchronous job depends on who computes what anyway, and so does one that is told not to be
        # deterministic.
        self._refuses = spec.mode is Mode.SYNC and spec.deterministic
        self.notices: list[str] = []

    def records(self, name: str, read: Callable[[], Records]) -> Records:
        """The first ones. Raises InvalidArgument if they are others the second time, and what `read`
        raises."""

        def difference(first: Records, second: Records) -> str:
            found = (
                difference_of(*both, f"record {n} ")
                for n, both in enumerate(zip(first, second, strict=False))
            )
            return next(filter(None, found), "")

        return self._judge(f"reading the records of {name}", read, difference)

    def minibatch(self, gradient: Callable[[], LaneResult]) -> None:
        """Forward and backward of the first minibatch. Raises InvalidArgument if the second time gives
        another loss or gradient, and what `gradient` raises."""

        def computed() -> tuple[float, dict[str, int]]:
            result, made = gradient(), self._compute.minibatch.gradient_views
            names = (place.name for place in self._compute.places)
            found = {name: int(digest(view)) for name, view in zip(names, made, strict=True)}
            self._compute.forget_nodes()
            return result.loss_sum, found

        def difference(first: tuple[float, dict[str, int]], second: tuple[float, dict[str, int]]) -> str:
            if not self._refuses and self._compute.layout.device != "cpu":
                return ""  # kernels of GPUs may give other bits each time
            if problem := difference_of(first[0], second[0], "the loss"):
                return problem
            return next(
                (
                    f"the gradient of {name} differs"
                    for name, bits in first[1].items()
                    if second[1][name] != bits
                ),
                "",
            )

        self._judge("the first minibatch (collate, loss, backward)", computed, difference)

    def _judge(self, what: str, once: Callable[[], T], differ: Callable[[T, T], str]) -> T:
        first, before = once(), self._snapshot()
        second, after = once(), self._snapshot()
        verdict: Verdict = judged(what, differ(first, second), before, after)
        if verdict.problem and self._refuses:
            raise InvalidArgument(f"{self._script.name}: {verdict.problem}", hint=verdict.hint)
        if told := verdict.problem or verdict.notice:
            self.notices.append(f"{self._script.name}: {told}")
        return first

    def _snapshot(self) -> Snapshot:
        return snapshot(self._script, {"the model": self._compute.model, **made_objects()})
