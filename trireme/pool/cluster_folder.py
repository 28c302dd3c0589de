"""The folder of a local cluster: DATA_DIR/_cluster/{cluster.json, cluster.lock, tokens/, etcd/, logs/, host/,
jobs/}.

No job can have this name, so `trireme run` never uses the folder. One `trireme up` at a time: it holds a
flock while it lives. cluster.json is what other commands need to find the cluster; the admin's token lets
them in, and only its owner can read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.launch.run_folder import DATA_DIR, is_locked, locked, read_json, write_json
from trireme.settings import UsageError
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.security.tokens import admin_token
from trireme_shared.protocol.errors import NotFound, PeerError

NAME, FACTS, LOCK = "_cluster", "cluster.json", "cluster.lock"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """`pid`: of `trireme up`. `url`: of the leader. `token`: of an admin ("": it needs none). `etcd`: as
    EtcdAccess.facts gives it."""

    folder: Path
    url: str
    etcd: dict[str, str]
    pid: int
    token: str


def place_of(data_dir: Path | None) -> Path:
    """The folder, whether it exists or not."""
    return (data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)).absolute() / NAME


@contextlib.contextmanager
def opened(data_dir: Path | None) -> Iterator[Path]:
    """Raises UsageError if it cannot be written or another cluster runs in it."""
    folder = place_of(data_dir)

    def taken(process: str) -> UsageError:
        msg = f"a cluster runs already in {folder} (process {process})"
        return UsageError(msg, hint="`trireme down` ends it; another one needs another --data-dir")

    with locked(folder.parent, folder / LOCK, taken):
        (folder / FACTS).unlink(missing_ok=True)
        try:
            yield folder
        finally:
            (folder / FACTS).unlink(missing_ok=True)


def publish(folder: Path, url: str, etcd: EtcdAccess) -> None:
    """For other commands, whenever another master leads."""
    write_json(folder / FACTS, {"url": url, **etcd.facts(), "pid": os.getpid()})


def find(data_dir: Path | None) -> ClusterFacts | None:
    """The cluster that runs there; None: there is none, or no master of it leads yet."""
    folder = place_of(data_dir)
    facts = read_json(folder / FACTS)
    if facts is None or not is_locked(folder / LOCK):
        return None
    etcd = EtcdAccess.from_facts(facts).facts()
    return ClusterFacts(folder, str(facts["url"]), etcd, int(facts["pid"]), admin_token(folder))


def must_find(data_dir: Path | None) -> ClusterFacts:
    """Raises NotFound: none runs there; PeerError: it has no leader yet."""
    facts = find(data_dir)
    if facts is not None:
        return facts
    folder = place_of(data_dir)
    if is_locked(folder / LOCK):
        raise PeerError(f"the cluster in {folder} has no leader yet; try again")
    hint = "start one with `trireme up`, or name one: --url, TRIREME_URL, or --data-dir"
    raise NotFound(f"no cluster runs in {folder}", hint=hint)


def started_at(data_dir: Path | None) -> float:
    """When its facts were last written, for comparison with those of a run; 0: it does not run."""
    try:
        return (place_of(data_dir) / FACTS).stat().st_mtime
    except OSError:
        return 0.0


def owner_of(folder: Path) -> int:
    """The process that runs the cluster; 0: none does. It runs also while no master leads."""
    if not is_locked(folder / LOCK):
        return 0
    text = (folder / LOCK).read_text(encoding="utf-8").strip()
    return int(text) if text.isdecimal() else 0


def describe(facts: ClusterFacts) -> dict[str, Any]:
    """For `--json`; the token stays in its file."""
    return {"url": facts.url, **facts.etcd, "pid": facts.pid, "folder": str(facts.folder)}
