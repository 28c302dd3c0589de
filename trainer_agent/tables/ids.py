"""Ids as users give them: any integers of 64 bits; texts by one hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.tables.grouping import Grouped, Numbers, grouped
from trireme_shared.tables.hashing import ids_of_texts

INTEGERS = torch.int64, torch.int32, torch.uint64, torch.uint32


def ids_of(texts: Iterable[str]) -> torch.Tensor:
    """An id for each text, int64 (n,): XXH3 of its UTF-8 bytes (64 bits, seed 0) as a signed number. The same everywhere. Raises
    InvalidArgument."""
    if isinstance(texts, str):
        raise InvalidArgument(f"ids_of takes a list of texts, got the text {texts!r:.80}; write ids_of([text])")
    given: list[object] = list(texts)
    if strange := [value for value in given if not isinstance(value, str)]:
        raise InvalidArgument(f"ids_of takes texts, got {type(strange[0]).__name__} {strange[0]!r:.80}")
    return torch.from_numpy(ids_of_texts([value for value in given if isinstance(value, str)]))


def integers(what: str, value: object) -> torch.Tensor:
    """A tensor of integers as int64, on its device. Unsigned numbers of 64 bits keep their bits: 2**64 - 1 becomes -1, so that each has an
    id of its own. Raises InvalidArgument."""
    if not isinstance(value, torch.Tensor):
        msg = f"{what}: got {type(value).__name__}; give a tensor of integers (torch.tensor(ids), trireme.nn.ids_of(texts))"
        raise InvalidArgument(msg)
    if value.dtype not in INTEGERS:
        msg = f"{what}: got a tensor of {value.dtype}; ids are int64, int32, uint64 or uint32, and .long() converts, if it holds whole numbers"
        raise InvalidArgument(msg)
    if value.dtype == torch.uint64:
        return value.detach().view(torch.int64)
    return value.detach().to(torch.int64)


def signed(number: int) -> int:
    """A Python integer of 64 bits, unsigned or not, as `integers` makes it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def on_host(ids: torch.Tensor) -> Numbers:
    """int64 (n,), of a tensor of any shape on any device."""
    found: Numbers = ids.reshape(-1).cpu().contiguous().numpy()
    return found


def check_offsets(what: str, offsets: torch.Tensor, ids: int) -> None:
    """int64, where each bag begins. Raises InvalidArgument."""
    if offsets.dim() != 1:
        msg = f"{what}: offsets have the shape {tuple(offsets.shape)}; they are one number for each bag, shape (bags,)"
        raise InvalidArgument(msg)
    found = on_host(offsets)
    if not len(found):
        if ids:
            raise InvalidArgument(f"{what}: got {ids} ids and no bag; offsets begin with 0")
        return
    if found[0] != 0:
        raise InvalidArgument(f"{what}: offsets begin with {found[0]}; the first bag begins at 0")
    falls = np.flatnonzero(np.diff(found) < 0)
    if len(falls):
        place = int(falls[0])
        msg = f"{what}: offsets fall from {found[place]} to {found[place + 1]} at place {place + 1}; each bag begins where the one before ends"
        raise InvalidArgument(msg)
    if found[-1] > ids:
        raise InvalidArgument(f"{what}: the last bag begins at {found[-1]}, and there are {ids} ids")


def named_ids(tables: Sequence[str], found: object) -> list[Grouped]:
    """What a script's `ids(batch)` returned, of each of these tables; without ids for those that it does not name. Raises InvalidArgument."""
    if not isinstance(found, Mapping):
        msg = (
            f"ids(batch) returned {type(found).__name__}; it returns a dict: the name of a table -> a tensor of its ids"
        )
        raise InvalidArgument(msg)
    if strange := [name for name in found if name not in tables]:
        msg = f"ids(batch) names the table {strange[0]!r:.80}, and the model's tables are {', '.join(tables):.200}"
        raise InvalidArgument(msg, hint="name them as the layers do, and leave out those that are none")
    nothing = torch.empty(0, dtype=torch.int64)
    return [grouped(on_host(integers(f"ids(batch) of table {name}", found.get(name, nothing)))) for name in tables]
