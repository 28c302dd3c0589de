"""A full disk under a run's folder: the job's etcd cannot go on there, so the run ends with one message and can be resumed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trireme_shared.protocol.errors import TriremeError

if TYPE_CHECKING:
    from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

NEEDED_BYTES = 256 << 20  # etcd's log has two files of 64 MB, its data and their snapshots grow besides
LEAST_BYTES = 64 << 20  # below this etcd cannot begin the next file of its log
FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(os.strerror(number).lower() for number in FULL)


class DiskFull(TriremeError):
    """No space is left under the run's folder. The job is unfinished and resumes once there is space."""

    code, status = "DISK_FULL", 507

    @classmethod
    def under(cls, folder: Path, cause: str) -> DiskFull:
        free = shutil.disk_usage(folder).free
        return cls(
            f"the disk of {folder} is full ({free >> 20} MiB are free): {cause}",
            hint=f"free at least {NEEDED_BYTES >> 20} MiB there, then the same command resumes the job",
            folder=str(folder),
            free_bytes=free,
            needed_bytes=NEEDED_BYTES,
        )


@contextmanager
def told_if_full(folder: Path) -> Iterator[None]:
    """Raises DiskFull for the errors of our own writes that mean a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull.under(folder, str(error)) from error


def is_full(folder: Path) -> bool:
    """Whether an etcd cannot go on there now."""
    return shutil.disk_usage(folder).free < LEAST_BYTES


def etcd_lacks_space(embedded: EmbeddedEtcd) -> bool:
    """Whether an etcd that ended by itself did so because its disk is full, or a quota used up."""
    return is_full(embedded.data_dir) or any(words in embedded.last_words().lower() for words in _WORDS)
