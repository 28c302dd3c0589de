"""All members of a job hash text alike, so that a set of names has the same order in each of them.

Python chooses another hash seed for each process unless PYTHONHASHSEED is set. A model whose modules come from a set, or a dataset whose files do,
would then differ between trainers, and from the job's own checkpoints when it is resumed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

NAME = "PYTHONHASHSEED"
DEFAULT = "0"


def hash_seed(environment: Mapping[str, str]) -> str:
    """The PYTHONHASHSEED of a member that is started with `environment`: the user's own number, else DEFAULT."""
    own = environment.get(NAME, "")
    return own if own.isdecimal() else DEFAULT  # "random" would be another number in each member


def fix_hash_seed() -> None:
    """Start this program again with a fixed hash seed, unless it has one: the seed cannot be changed once Python runs. For members that no
    launcher has started. Call it before anything else."""
    if not os.environ.get(NAME, "").isdecimal():
        os.environ[NAME] = DEFAULT
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  the same program
