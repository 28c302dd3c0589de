"""Tracebacks as users read them: the frames of their script, else those of libraries, never ours."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from trireme_shared.protocol.errors import TriremeError

ONE_RECORD = "Expected more than 1 value per channel when training"  # torch's words
DROP_LAST = (
    "BatchNorm cannot train on a minibatch of one record, which the last one of a file may be; set drop_last=True, which leaves short "
    "minibatches out, or another global_batch_size or number of lanes"
)
_PACKAGES = Path(__file__).resolve().parents[2]
_OURS = ("trireme_shared", "trainer_agent", "trireme")


def message_of(error: BaseException) -> str:
    """What `error` says, with its hint if it is one of ours, or if a setting helps."""
    if isinstance(error, TriremeError) and error.hint:
        return f"{error.message}; {error.hint}"
    if isinstance(error, ValueError) and ONE_RECORD in str(error):
        return f"{error}; {DROP_LAST}"
    return str(error)


def traceback_of(error: BaseException, folder: Path) -> str:
    """The traceback of `error`, cut down to the frames below `folder`, the script's."""
    return "".join(_trimmed(error, folder))


def _trimmed(error: BaseException, folder: Path) -> list[str]:
    frames = [
        frame
        for frame in traceback.extract_tb(_first_frame_below(error.__traceback__, folder))
        if not _is_of_trireme(frame.filename)
    ]
    users = [frame for frame in frames if _is_below(frame.filename, folder)]
    lines = traceback.format_exception_only(type(error), error)
    if type(error).__module__.partition(".")[0] in _OURS:
        lines = [f"{type(error).__name__}: {message_of(error)}\n"]
    if not frames or (isinstance(error, SyntaxError) and not users):  # the message of a SyntaxError has the place
        return lines
    return ["Traceback (most recent call last):\n", *traceback.format_list(users or frames), *lines]


def _first_frame_below(trace: TracebackType | None, folder: Path) -> TracebackType | None:
    walk = trace
    while walk is not None and not _is_below(walk.tb_frame.f_code.co_filename, folder):
        walk = walk.tb_next
    return walk if walk is not None else trace


def _is_of_trireme(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGES) and path.relative_to(_PACKAGES).parts[0] in _OURS


def _is_below(filename: str, folder: Path) -> bool:
    path = Path(filename)
    return path.is_relative_to(folder) and "site-packages" not in path.parts
