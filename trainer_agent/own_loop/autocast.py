"""Autocast belongs to a thread: that of the caller is taken over to the script's thread for the forward pass of one batch."""

from __future__ import annotations

import torch

DEVICES = "cpu", "cuda"


def enabled() -> list[torch.autocast]:
    """As it is in this thread, to be entered in another one."""
    return [
        torch.autocast(device, dtype=torch.get_autocast_dtype(device))
        for device in DEVICES
        if torch.is_autocast_enabled(device)
    ]
