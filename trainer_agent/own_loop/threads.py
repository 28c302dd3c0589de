"""How many threads torch computes with: as many as the setting threads_per_trainer says, since results have other bits with another number.

torch keeps the number for each thread of a process, so it is set in the thread that computes, and in the thread of a script's own loop.
"""

from __future__ import annotations

import os

import torch

OVERRULED = (
    "the script calls torch.set_num_threads({asked}), and it is trained with {threads}, the setting threads_per_trainer, because the number of threads "
    "changes the bits of results: set threads_per_trainer = {asked} instead"
)


def use_threads(threads: int) -> str:
    """Let the calling thread compute with `threads` threads. Return a sentence for the user if the script has asked torch for another
    number here, else "". A number that torch chooses by itself on this machine may be one that nobody has asked for: it is not told."""
    asked = torch.get_num_threads()
    torch.set_num_threads(threads)
    return "" if asked in (threads, *_chosen_by_torch()) else OVERRULED.format(asked=asked, threads=threads)


def _chosen_by_torch() -> set[int]:
    """The processors of this machine or process, or their cores with two processors each, or what the environment says."""
    processors = {os.cpu_count() or 1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}
    named = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return processors | {number // 2 for number in processors} | {int(text) for text in named if text.isdecimal()}
