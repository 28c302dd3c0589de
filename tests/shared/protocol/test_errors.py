"""Errors keep their class, message and values over the wire."""

from __future__ import annotations

import importlib

import pytest

from trireme_shared.protocol.errors import (
    CallerError,
    PeerError,
    StaleAttempt,
    TriremeError,
    WrongOwner,
    from_map,
    subclasses,
)


def test_an_error_survives_the_wire() -> None:
    error = StaleAttempt("task 7 attempt 2 is stale: attempt 3 is pending", hint="fetch a new task", task=7)
    again = from_map(error.to_map())
    assert (type(again), again.message, again.hint, again.details) == (
        StaleAttempt,
        error.message,
        error.hint,
        error.details,
    )


def test_every_code_names_one_class() -> None:
    importlib.import_module("trireme.cli.exit_codes")  # which knows the errors of all packages
    for code, kind in subclasses(TriremeError).items():
        assert type(from_map(kind("x").to_map())) is kind
        assert kind.code == code


@pytest.mark.parametrize(("retryable", "kind"), [(True, PeerError), (False, CallerError)])
def test_an_unknown_code_keeps_whose_fault_it_is(retryable: bool, kind: type[TriremeError]) -> None:
    assert type(from_map({"code": "NEW_IN_2030", "message": "?", "retryable": retryable})) is kind


def test_peer_errors_are_retryable_and_caller_errors_are_not() -> None:
    for kind in subclasses(TriremeError).values():
        assert kind.retryable == issubclass(kind, PeerError)
        assert 400 <= kind.status < 600
    assert not WrongOwner("x").to_map()["retryable"]
