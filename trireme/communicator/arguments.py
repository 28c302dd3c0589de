"""What callers give to a communicator, checked before anything is begun: numbers as float or int, whatever type of number they were."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

from trireme_shared.platform.membership.etcd_access import PASSWORD, EtcdAccess, split
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.errors import InvalidArgument

MOST_S = 365 * 86400.0  # the clocks of threads, torch and etcd end somewhere above


def seconds(name: str, value: Any, least: float, *, above: bool = False) -> float:
    """Raises InvalidArgument: no number from `least` (`above`: more than that) to a year."""
    found = as_float(value)
    if found is None or not least <= found <= MOST_S or (above and found == least):
        shown = f"{found:g}" if found is not None else repr(value)
        msg = f"{name} {shown} must be {'above' if above else 'at least'} {least:g} and at most {MOST_S:.0f} (seconds)"
        raise InvalidArgument(msg)
    return found


def whole(name: str, value: Any, least: int, meaning: str) -> int:
    """Raises InvalidArgument: no int from `least`. Bools are none."""
    try:
        found = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        found = None
    if found is None or found < least:
        raise InvalidArgument(f"{name} is {value!r}; it is {meaning}")
    return found


def weight_of(value: Any, *, summed: bool) -> float:
    """Raises InvalidArgument."""
    found = as_float(value)
    if found is None or not 0 <= found < float("inf") or (summed and found != 1):
        raise InvalidArgument(f"weight is {value!r}; it is 0 or a positive number, and SUM has none")
    return found


def as_float(value: Any) -> float | None:
    """None: it is no number. Texts are none, whatever they say; tensors and arrays of one element are."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def job_of(job: Any) -> str:
    """Raises InvalidArgument."""
    name = os.environ.get("TRIREME_JOB", "") if job is None or job == "" else job
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidArgument(f"the job is {name!r}; give a name without '/', job= or TRIREME_JOB")
    return name


def access_of(etcd: str | Sequence[str] | None) -> EtcdAccess:
    """Raises InvalidArgument."""
    given: Any = etcd if etcd is not None else os.environ.get("TRIREME_ETCD", "")
    try:
        urls = split(given) if isinstance(given, str) else tuple(given)
    except TypeError:
        urls = (given,)
    if not all(isinstance(url, str) for url in urls):
        raise InvalidArgument(f"etcd is {hidden(repr(given))}; it is an address or several, as http://host:2379")
    if not urls:
        raise InvalidArgument("no etcd is named; give etcd= or TRIREME_ETCD, as http://host:2379")
    names = ("user", "password_file", "ca", "cert", "key")
    found = {name: os.environ.get(f"TRIREME_ETCD_{name.upper()}", "") for name in names}
    return EtcdAccess(urls, password=os.environ.get(PASSWORD, ""), **found)
