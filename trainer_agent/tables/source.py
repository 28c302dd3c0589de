"""Where a layer's rows come from, for the time of a minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trireme_shared.tables.grouping import Numbers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trainer_agent.tables.recording import Recording


class RowSource(Protocol):
    """All tables of a model, at one version."""

    def lookup(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        """The rows of the ids: float32 (n, dim), a new array that nobody else writes. `table`: its place in `tables_of`; `ids`: int64 (n,),
        n > 0, ascending, each once. Blocks until they are there; called in the thread of the forward pass."""
        ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What a layer looks up in. `recording`: what the rows' gradients will be told to; None: they have none."""

    source: RowSource
    table: int
    recording: Recording | None = None
