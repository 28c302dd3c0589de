"""What a script asks of the Hugging Face Hub (`from_pretrained`, `load_dataset`) where neither this host's
cache nor the Hub has it for this process: one sentence instead of the frames of four libraries."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from trireme_shared.datasets.user_modules import is_below

#: Exceptions of huggingface_hub by name: nobody could be asked; the name is neither a folder nor one of the
#: Hub.
NOT_CACHED, NO_NAME = ("LocalEntryNotFoundError", "OfflineModeIsEnabled"), ("HFValidationError",)
UNREACHED = "on the Hub"  # in what `datasets` says


def unreached(error: BaseException, folder: Path) -> str:
    """What is missing and what to do, if that is why `error` was raised, else "". `folder`: of the script."""
    found = [_kind(each) for each in _chain(error)]
    if "cache" in found:
        why = "are not in the cache of this host, and the Hugging Face Hub cannot be reached"
        todo = (
            f"with HF_HOME set alike for all members of the job (here the cache is {_cache()}), "
            "download them once where the Hub is reached: `hf download NAME`; or give a folder that all "
            "members see. HF_HUB_OFFLINE=1 leaves out the retries (docs/huggingface.md)"
        )
    elif "name" in found:
        why = "are nowhere: that is no folder that this host has, and no name of the Hugging Face Hub"
        todo = "correct the path; all members must see the folder (docs/huggingface.md)"
    else:
        return ""
    return f"the files that {_asked(error, folder)} asks for {why}; {todo}"


def _kind(error: BaseException) -> str:
    name, library = type(error).__name__, type(error).__module__.partition(".")[0]
    if library == "huggingface_hub" and name in NO_NAME:
        return "name"
    of_datasets = isinstance(error, ConnectionError) and UNREACHED in str(error)
    return "cache" if of_datasets or (library == "huggingface_hub" and name in NOT_CACHED) else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _asked(error: BaseException, folder: Path) -> str:
    """The line of the script that asks."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_below(Path(frame.filename), folder)
    ]
    if not frames:
        return "the script"
    return f"`{frames[-1].line}` (line {frames[-1].lineno} of {Path(frames[-1].filename).name})"


def _cache() -> str:
    constants = sys.modules.get("huggingface_hub.constants")
    return str(getattr(constants, "HF_HUB_CACHE", os.environ.get("HF_HOME", "~/.cache/huggingface")))
