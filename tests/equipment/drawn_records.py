"""Records with random values: whatever their fields allow, and their validators take."""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import master_service
import trainer_agent.collective
import trireme.client
import trireme_shared
from trireme_shared.protocol.records import Record

ROOTS = (trireme_shared, master_service, trainer_agent.collective, trireme.client)
LIMITS = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "allow_inf_nan")
#: What no random value meets: fields whose validators want a certain form.
FORMS: Mapping[tuple[str, str], Sequence[Any]] = {
    ("StopEarly", "metric"): ("loss:min", "accuracy:max"),
    ("Tracker", "kind"): ("csv", "my.module:Own"),
    ("JobTask", "command"): ("true", "./prepare.sh"),
    ("Scheduling", "not_before_time"): ("", "2026-12-01T00:00:00Z"),
    ("JobSettings", "keep_best"): (None, "accuracy:max"),
    ("JobSpec", "keep_best"): (None, "accuracy:max"),
}
MOST_OPTIONAL = 4  # fields at once: more would be refused too often, because they do not go together


def all_records() -> list[type[Record]]:
    """Every record of the product that JSON can say: those with bytes travel in frames alone."""
    for root in ROOTS:
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    framed = {kind for kind in _below(Record) if "bytes" in str([*kind.__annotations__.values()])}
    return sorted(_below(Record) - framed, key=lambda kind: (kind.__module__, kind.__name__))


def _below(kind: type[Record]) -> set[type[Record]]:
    found: set[type[Record]] = set()
    for child in kind.__subclasses__():
        if not child.__module__.startswith("tests"):
            found |= {child} | _below(child)
    return found


@st.composite
def drawn(draw: st.DrawFn, kind: type[BaseModel]) -> BaseModel:
    fields = kind.model_fields
    needed = [name for name, field in fields.items() if field.is_required() or _form(kind, name)]
    others = [name for name in fields if name not in needed]
    chosen = draw(st.lists(st.sampled_from(others), max_size=MOST_OPTIONAL, unique=True)) if others else []
    values = {name: draw(_of_field(kind, name, fields[name])) for name in (*needed, *chosen)}
    try:
        return kind.model_validate(values)
    except ValidationError:
        reject()


def _form(kind: type[BaseModel], name: str) -> Sequence[Any]:
    return FORMS.get((kind.__name__, name), ())


def _of_field(kind: type[BaseModel], name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    if form := _form(kind, name):
        return st.sampled_from(form)
    finite = kind.model_config.get("ser_json_inf_nan") != "constants"  # else JSON says null instead
    return _values(field.annotation, {"finite": finite, **_limits(field.metadata)})


def _limits(metadata: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in metadata:
        found |= _limits(each.metadata) if isinstance(each, FieldInfo) else {}
        found |= {name: value for name in LIMITS if (value := getattr(each, name, None)) is not None}
    return found


def _values(annotation: Any, limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(parts[0], {**limits, **_limits(parts[1:])})
    if origin in (Union, types.UnionType):
        return st.one_of([_values(part, limits) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is not None:
        return _many(origin, parts, limits)
    if annotation is type(None):
        return st.none()
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return st.deferred(lambda: drawn(annotation))
    return _plain(annotation, limits)


def _many(origin: Any, parts: tuple[Any, ...], limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    least = limits.get("min_length", 0)
    most, inside = min(limits.get("max_length", 3), max(least, 3)), {"finite": limits["finite"]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(
            _values(parts[0], inside), _values(parts[1], inside), min_size=least, max_size=most
        )
    if origin is tuple and parts[-1] is not Ellipsis:
        return st.tuples(*(_values(part, inside) for part in parts))
    if origin in (set, frozenset):
        return st.frozensets(_values(parts[0], inside), min_size=least, max_size=most)
    return st.lists(_values(parts[0], inside), min_size=least, max_size=most).map(tuple)


def _plain(annotation: Any, limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    least, most = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(least, most)
    if annotation is float:
        finite = limits["finite"] or limits.get("allow_inf_nan") is False
        return st.floats(least, most, allow_nan=False, allow_infinity=False if finite else None)
    if annotation is str:
        if pattern := limits.get("pattern"):
            return st.from_regex(pattern, fullmatch=True)
        return st.text(max_size=min(limits.get("max_length", 30), 30), min_size=limits.get("min_length", 0))
    return st.sampled_from([None, 1, "text", [1, 2], {"a": 1}])  # Any
