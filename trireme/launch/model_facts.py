"""The facts about a script's model and optimizer that an unfinished job depends on. They are kept in the run's folder and compared
when the job resumes.

{"tensors": [[kind, name, shape, dtype, group], ...], "optimizer": {"name", "defaults", "groups"}, "tables": [TableSpec, ...]}   (trainer_agent.script.inspect)
Tensors that are not contiguous have their strides after the group.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

from trireme_shared.protocol.records.layout import ELEMENT_BYTES, TableSpec

FILE = "model.json"  # does not exist if the run was started with --no-check
KINDS = {"param": "parameter", "buffer": "buffer"}

Facts = dict[str, Any]


def parameter_bytes(facts: Facts) -> int:
    """Of the parameters that the optimizer steps, in bytes."""
    trained = [tensor for tensor in facts["tensors"] if tensor[0] == "param" and tensor[4] >= 0]
    return sum(math.prod(shape) * ELEMENT_BYTES[dtype.removeprefix("torch.")] for _, _, shape, dtype, *_ in trained)


def difference(then: Facts | None, now: Facts | None) -> str:
    """The first difference, with both values; "" if there is none or one side is not known."""
    if then is None or now is None:
        return ""
    if is_reordered(then, now):
        old, new = next((a[1], b[1]) for a, b in zip(then["tensors"], now["tensors"], strict=True) if a != b)
        return f"the same parameters and buffers are in another order ({new} is where {old} was)"
    for old, new in zip_longest(then["tensors"], now["tensors"]):
        if old != new:
            return _tensors(old, new)
    return _optimizers(then["optimizer"], now["optimizer"]) or _tables(then, now)


def is_reordered(then: Facts | None, now: Facts | None) -> bool:
    """Whether both have the same parameters and buffers, in another order."""
    if then is None or now is None or then["tensors"] == now["tensors"]:
        return False
    return sorted(map(str, then["tensors"])) == sorted(map(str, now["tensors"]))


def tables_in(facts: Facts) -> dict[str, TableSpec]:
    """By name; none in the file of an earlier version, which did not tell of them."""
    return {table["name"]: TableSpec.model_validate(table) for table in facts.get("tables", ())}


def _tables(then: Facts, now: Facts) -> str:
    if "tables" not in then or "tables" not in now:
        return ""
    old, new = tables_in(then), tables_in(now)
    gone = [f"embedding table {name} does not exist any more" for name in old if name not in new]
    gone += [f"embedding table {name} is new" for name in new if name not in old]
    if gone:
        return " and ".join(gone[:2])
    changed = [(name, *one) for name, table in old.items() for one in table.differences(new[name])]
    return "".join(
        f"{what} of embedding table {name} was {was!r}, now it is {now!r}" for name, what, was, now in changed[:1]
    )


def _tensors(old: list[Any] | None, new: list[Any] | None) -> str:
    if old is None or new is None:
        there, when = (new, "is new") if old is None else (old, "does not exist any more")
        assert there is not None
        return f"{KINDS[there[0]]} {there[1]} {_text(there)} {when}"
    if old[1] != new[1]:
        return f"{KINDS[old[0]]} {old[1]} {_text(old)} was in the place of {KINDS[new[0]]} {new[1]} {_text(new)}"
    if old[2:4] != new[2:4]:
        return f"{KINDS[old[0]]} {old[1]} was {_text(old)}, now it is {_text(new)}"
    if old[5:] != new[5:]:
        return f"{KINDS[old[0]]} {old[1]} was {_order(old)}, now it is {_order(new)}"
    return f"{KINDS[old[0]]} {old[1]} was in optimizer group {old[4]}, now it is in {new[4]}"


def _text(tensor: list[Any]) -> str:
    return f"{str(tensor[3]).removeprefix('torch.')} {tensor[2]}"


def _order(tensor: list[Any]) -> str:
    return f"laid out with strides {tensor[5]}" if tensor[5:] else "contiguous"


def _optimizers(old: Facts, new: Facts) -> str:
    if old["name"] != new["name"]:
        return f"the optimizer was {old['name']}, now it is {new['name']}"
    if len(old["groups"]) != len(new["groups"]):
        return f"the optimizer had {len(old['groups'])} groups, now it has {len(new['groups'])}"
    for number, (before, after) in enumerate(zip(old["groups"], new["groups"], strict=True)):
        for option in before.keys() & after.keys():
            if before[option] != after[option]:
                return f"the optimizer's {option} was {before[option]!r}, now it is {after[option]!r} (group {number})"
    for option in old["defaults"].keys() & new["defaults"].keys():  # another torch may know more of them
        if old["defaults"][option] != new["defaults"][option]:
            return f"the optimizer's {option} was {old['defaults'][option]!r}, now it is {new['defaults'][option]!r}"
    return ""
