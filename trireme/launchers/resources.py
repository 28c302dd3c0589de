"""What one process takes of a node: `CPU=2,GPU=1,memory=8GiB,spot=1`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trireme_shared.protocol.errors import InvalidArgument

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ITEM = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.:-]*)\s*=\s*(\d+(?:\.\d+)?)\s*([KMGT]iB)?\s*")
_NATIVE = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True, slots=True)
class Resources:
    """`amounts`: by name. CPU, GPU and memory (bytes) mean what they say; other names are the cluster's own."""

    amounts: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.amounts.items())

    @classmethod
    def parse(cls, text: str, option: str) -> Resources:
        """Raises InvalidArgument that names `option`."""
        amounts: dict[str, float] = {}
        for item in text.split(","):
            found = _ITEM.fullmatch(item)
            if found is None or (found[3] and found[1] != "memory"):
                msg = f"{option} {text!r}: {item.strip()!r} is no NAME=AMOUNT"
                raise InvalidArgument(msg, hint="for example CPU=2,GPU=1,memory=8GiB")
            amounts[found[1]] = float(found[2]) * UNITS[found[3] or ""]
        if not any(amounts.values()):
            raise InvalidArgument(
                f"{option} {text!r} asks for nothing", hint="a process takes at least a part of a CPU"
            )
        return cls(amounts)

    @property
    def cores(self) -> int:
        """At least 1."""
        return max(1, int(self.amounts.get("CPU", 1)))

    def bundle(self) -> dict[str, float]:
        """For a placement group."""
        return {name: amount for name, amount in self.amounts.items() if amount}

    def options(self) -> dict[str, Any]:
        """For an actor in such a bundle."""
        native = {option: self.amounts.get(name, 0) for name, option in _NATIVE.items()}
        own = {name: amount for name, amount in self.amounts.items() if name not in _NATIVE}
        return {**{name: amount for name, amount in native.items() if amount or name == "num_cpus"}, "resources": own}
