"""What writing and committing checkpoints need of the process that owns blocks: a parameter server, or a trainer of a collective job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trireme_shared.checkpoints.background import Offload
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.own_key import OwnKey
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, SlotMap


class PartOwner(Protocol):
    """`name`: for people. `timeline`: of its parameters. `term`: the highest it has seen. `checkpoint_error`: why its checkpoints cannot be written now,
    for people; "" if they can."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def timeline(self) -> int: ...

    @property
    def term(self) -> int: ...

    checkpoint_error: str


class Living(Protocol):
    """The owners by that slot map that live, as far as this process knows: their names by their indices."""

    def __call__(self, slots: SlotMap) -> Mapping[int, str]: ...


@dataclass(frozen=True, slots=True)
class SavingContext:
    """`own_key`: every write proves that the process still holds it. `offload` runs what blocks. `slots_of`: the slot map of that version; None: this
    process does not know it any more."""

    etcd: Etcd
    directory: Directory
    owner: PartOwner
    own_key: OwnKey[Any]
    offload: Offload
    living: Living
    slots_of: Callable[[int], SlotMap | None]

    @property
    def name(self) -> str:
        return self.owner.name

    @property
    def keys(self) -> Keys:
        return self.directory.keys

    @property
    def spec(self) -> JobSpec:
        assert self.directory.spec is not None, "nothing is owned before the spec is known"
        return self.directory.spec
