"""Which settings go with which strategy, and with which exchange of gradients."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel

from trireme_shared.protocol.records.job_spec.choices import Mode, Strategy

OF_NATIVE = ("backend", "reduction", "bucket_bytes")
"""Settings that only native exchange has."""


class Settings(Protocol):
    """Those of JobSettings that are compared here."""

    @property
    def strategy(self) -> Strategy: ...

    @property
    def mode(self) -> Mode: ...

    @property
    def pservers(self) -> int: ...

    @property
    def parameter_dtype(self) -> str: ...

    @property
    def min_members(self) -> int: ...

    @property
    def exchange(self) -> str: ...


def check_strategy(spec: Settings) -> None:
    """Raises ValueError."""
    if spec.strategy is Strategy.COLLECTIVE and spec.mode is not Mode.SYNC:
        msg = f"strategy is collective, which only synchronous jobs can have, and mode is {spec.mode}; use mode sync, or strategy parameter_server"
        raise ValueError(msg)
    if spec.strategy is Strategy.COLLECTIVE and spec.pservers:
        msg = f"pservers is {spec.pservers}, but a job with strategy collective has no parameter servers; leave it out, or use strategy parameter_server"
        raise ValueError(msg)
    if spec.strategy is Strategy.COLLECTIVE and spec.parameter_dtype != "float32":
        msg = f"parameter_dtype is {spec.parameter_dtype}, but with strategy collective no parameters travel in a step; leave it out (gradient_dtype is for gradients, both ways)"
        raise ValueError(msg)
    if spec.strategy is Strategy.PARAMETER_SERVER and not spec.pservers:
        msg = (
            "pservers is 0: a job needs one at least, which hold its parameters; only strategy collective does without"
        )
        raise ValueError(msg)
    if spec.strategy is Strategy.PARAMETER_SERVER and spec.min_members > 1:
        msg = f"min_members is {spec.min_members}, which only jobs with strategy collective can have; leave it out, or use that strategy"
        raise ValueError(msg)
    _check_exchange(spec)


def _check_exchange(spec: Settings) -> None:
    if spec.strategy is Strategy.PARAMETER_SERVER and spec.exchange != "direct":
        msg = f"exchange is {spec.exchange}, which only jobs with strategy collective can have; leave it out, or use that strategy"
        raise ValueError(msg)
    if spec.exchange == "direct":
        assert isinstance(spec, BaseModel)
        fields = type(spec).model_fields
        for name in OF_NATIVE:
            if (value := getattr(spec, name)) != fields[name].default:
                msg = f"{name} is {value}, which only native exchange has, and exchange is direct; leave it out, or use exchange native"
                raise ValueError(msg)
