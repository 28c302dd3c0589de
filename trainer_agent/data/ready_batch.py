"""A minibatch that was collated before its forward pass, as if it had been collated in it: the random numbers go on where `collate` left them.

prepare: generators kept ─► seeded ─► collate ─► ReadyBatch ─► generators as they were          backward: ReadyBatch.begin ─► loss(model, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme_shared.datasets.random_state import Generators
from trireme_shared.protocol.metrics import Logged, collected


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """`generators`: after `collate`; `logged`: in it."""

    batch: Any
    generators: Generators
    logged: Mapping[str, Logged]

    @classmethod
    def made(cls, collate: Callable[[], Any]) -> ReadyBatch:
        """By `collate()`, with generators that are seeded."""
        with collected() as logged:
            batch = collate()
        return cls(batch, Generators.now(), logged)

    def begin(self, logged: dict[str, Logged]) -> Any:
        """The batch, for a forward pass whose metrics go to `logged`."""
        logged.update(self.logged)
        self.generators.restore()
        return self.batch
