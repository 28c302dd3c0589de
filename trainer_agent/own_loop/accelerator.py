"""Accelerate of Hugging Face in a script: its Accelerator moves, wraps and scales in one process what a job
trains in many."""

from __future__ import annotations

import sys

from trireme_shared.protocol.errors import InvalidArgument


def check_no_accelerator(script: str) -> None:
    """`script`: as messages call it. Raises InvalidArgument if this process has made an
    `accelerate.Accelerator`. (Other libraries import Accelerate, too: that changes nothing.)"""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized():
        raise InvalidArgument(
            f"{script} makes an accelerate.Accelerator(): each trainer would have one of its own, which "
            "would move, wrap and scale what the job trains",
            hint="leave it out: trireme.prepare, trireme.backward and settings take the place of its methods "
            "(docs/loop.md#from-accelerate)",
        )
