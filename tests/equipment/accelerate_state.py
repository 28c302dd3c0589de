"""Accelerate keeps what an Accelerator is in this process, for good."""

from __future__ import annotations

import pytest


def forget_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the test makes are gone when it ends."""
    for state in ("AcceleratorState", "PartialState", "GradientState"):
        monkeypatch.setattr(f"accelerate.state.{state}._shared_state", {})
