"""What the norm of a step's whole gradient does to the step, by the job's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trireme_shared.blocks.gradient_norm import clip_factor
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.job_choices import Nonfinite


@dataclass(frozen=True, slots=True)
class Clipping:
    """`limit`: clip_grad_norm; blocks hold their gradients until the norm is known (None: they do not). `every`: without a limit, the
    norm is measured in every so many steps (0: never)."""

    limit: float | None
    on_nonfinite: Nonfinite = "fail"
    every: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Clipping | None:
        """None: nothing is held or measured. In asynchronous jobs the trainer clips what it pushes."""
        if spec.mode is not Mode.SYNC:
            return None
        return cls(spec.clip_grad_norm, spec.on_nonfinite, spec.grad_norm_every)

    @property
    def holds(self) -> bool:
        return self.limit is not None

    def measures(self, step: int) -> bool:
        """Whether squares of the step's gradient are added up without holding it."""
        return self.limit is None and self.every > 0 and step % self.every == 0

    def check(self, step: int, norm: float) -> None:
        """Raises InvalidArgument: such a norm is not taken."""
        if norm < 0 or (self.on_nonfinite == "fail" and not math.isfinite(norm)):
            msg = f"the norm of the gradient of step {step} is {norm}: expected a finite number that is not negative"
            raise InvalidArgument(msg)

    def factor(self, norm: float) -> float | None:
        """What the gradient is multiplied by; None: the step is left out, since the norm is not finite."""
        if self.on_nonfinite == "skip" and not math.isfinite(norm):
            return None
        assert self.limit is not None
        return clip_factor(norm, self.limit)
