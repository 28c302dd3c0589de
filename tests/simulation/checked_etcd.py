"""The simulated etcd with checks inside: each write is checked the moment it is executed.

Checked: who may write what (fencing of masters and sweepers), that terms and generations never go back, that
a task of the queue is in one place only, and at one trainer only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tests.equipment.cluster.network import Network
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.simulation.checkpoint_checker import CheckpointChecker
from tests.simulation.task_checker import TaskChecker
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    Dispatch,
    JobSpec,
    JobState,
    MasterAddress,
    MasterLock,
    Mode,
    Phase,
    SlotMap,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.operations import Operation


@dataclass(frozen=True)
class CheckpointBound:
    """The oldest checkpoint that a request may get: its step (asynchronous: its number) in the timeline of
    the request."""

    timeline: int
    step: int


class CheckedEtcd(SimulatedEtcd):
    """`violations` grow; `url_of(client)` names the master behind a client; `version()`: the lowest of all
    blocks."""

    def __init__(
        self,
        keys: Keys,
        network: Network,
        url_of: Callable[[str], str],
        version: Callable[[], int],
        spec: JobSpec,
    ) -> None:
        super().__init__(rng=network.rng)
        self.leader_lock = keys.master_lock if spec.dispatch is Dispatch.MASTER else keys.sweep_lock
        self._masterless = spec.dispatch is Dispatch.ETCD
        self._tasks = TaskChecker(keys)
        self._network = network
        self.keys = keys
        self.violations: list[str] = []
        self.state = JobState()
        self.term = 0
        self.checkpoints_seen: dict[str, CheckpointLatest] = {}
        self.bounds: dict[str, CheckpointBound] = {}
        self._sync = spec.mode is Mode.SYNC
        self._url_of, self._version = url_of, version
        self._checkpoints = CheckpointChecker(keys.job)
        self._seen = 0
        self._progresses, self._queue = keys.progresses.encode(), keys.tasks.encode()
        self._masters_own = tuple(
            key.encode()
            for key in (
                keys.tasks,
                keys.state,
                keys.spec,
                keys.trainer_list,
                keys.trainers_change,
                keys.slots,
                keys.pservers_desired,
                keys.master_address,
                keys.checkpoint_request,
                keys.operations,
                keys.migration,
                keys.given,
            )
        )
        self._slots_version = 0
        self.renewing = ""  # the launcher's process, while the user gives the job more epochs

    def delay(self) -> float:
        """The network's; a slow message may arrive after a whole term."""
        delay = self._network.delay()
        return delay * 4 if delay > 0.5 else delay

    def serve(self, request: Any) -> None:
        super().serve(request)
        self._check(request.client)

    def _check(self, client: str) -> None:
        if self._seen == len(self.store.history):
            return
        events, self._seen = self.store.history[self._seen :], len(self.store.history)
        renewed = client == self.renewing
        for event in events:
            kv = event["kv"]
            deleted = event.get("type") == "DELETE"
            leased = kv["key"].startswith(self._progresses) or kv["key"].endswith(b"/master/addr")
            if kv["key"].startswith(self._masters_own) and not ((deleted and leased) or renewed):
                self._check_writer(client, kv["key"].decode(), kv)
            if not deleted and not (renewed and kv["key"] == self.keys.latest.encode()):
                self._check_order(kv["key"].decode(), kv, renewed=renewed)
        if any(event["kv"]["key"].startswith(self._queue) for event in events):
            self._check_places()
        for _, written in groupby(events, key=lambda event: event["kv"]["mod_revision"]):
            self.violations += self._tasks.check(list(written))

    def overlook(self) -> None:
        """Do not check what the test itself wrote into the store."""
        self._seen = len(self.store.history)

    def _check_writer(self, client: str, key: str, kv: dict[str, Any]) -> None:
        lock = self.value(self.leader_lock)
        holder = MasterLock.model_validate_json(lock).url if lock is not None else "nobody"
        if self._url_of(client) != holder and not (self._masterless and self._is_trainers(client, key, kv)):
            self.violations.append(f"{client} wrote {key} while {holder} held {self.leader_lock}")

    def _is_trainers(self, client: str, key: str, kv: dict[str, Any]) -> bool:
        """What any trainer of a masterless job may write: the queue, the stages that follow from it, and
        requests."""
        if key.startswith(self.keys.operations) or key in (self.keys.checkpoint_request, self.keys.commit):
            return True
        if not client.startswith("trainer"):
            return False
        if key != self.keys.state:
            return (key.startswith(self.keys.tasks) and key != self.keys.task_meta) or self._closes_epoch(
                key, kv
            )
        new, old = JobState.model_validate_json(kv["value"]), self.state
        return (new.generation, new.timeline) == (old.generation, old.timeline)

    def _closes_epoch(self, key: str, kv: dict[str, Any]) -> bool:
        return key == self.keys.task_meta and kv["version"] > 1

    def _check_order(self, key: str, kv: dict[str, Any], *, renewed: bool) -> None:
        if key == self.keys.state:
            state = JobState.model_validate_json(kv["value"])
            if state.generation < self.state.generation:
                self.violations.append(
                    f"generation went back from {self.state.generation} to {state.generation}"
                )
            if self.state.phase.final and not renewed and state.phase is not self.state.phase:
                self.violations.append(f"the job left {self.state.phase} for {state.phase}")
            if state.phase is Phase.FAILED:
                self.violations.append(f"the job failed: {state.reason}")
            self.state = state
        elif key == self.keys.latest:
            self.violations += self._checkpoints.check(kv["value"])
            latest = CheckpointLatest.model_validate_json(kv["value"])
            self.checkpoints_seen[latest.uuid] = latest
        elif key.startswith(self.keys.operations) and kv["version"] == 1:
            self._note_request(Operation.model_validate_json(kv["value"]))
        elif key == self.keys.slots:
            version = SlotMap.model_validate_json(kv["value"]).version
            if version <= self._slots_version:
                self.violations.append(f"slot map {version} was written after {self._slots_version}")
            self._slots_version = version
        elif key == self.keys.master_lock:
            self._grow(kv["create_revision"])
        elif key == self.keys.master_address:
            self._grow(MasterAddress.model_validate_json(kv["value"]).term)

    def _note_request(self, asked: Operation) -> None:
        """`step` is there if the pause begins in the same transaction."""
        step = self._version() if self._sync else asked.step or self.state.saved + 1
        self.bounds[asked.operation_id] = CheckpointBound(self.state.timeline, step)

    def _grow(self, term: int) -> None:
        if term < self.term:
            self.violations.append(f"the term went back from {self.term} to {term}")
        self.term = max(self.term, term)

    def _check_places(self) -> None:
        pending = self.names(self.keys.pending(""))
        both = pending & self.names(self.keys.requeued(""))
        if both:
            self.violations.append(f"tasks {sorted(both)} are pending and requeued")

    def value(self, key: str) -> bytes | None:
        found = self.store.execute("/kv/range", {"key": key.encode()}).get("kvs")
        return bytes(found[0]["value"]) if found else None

    def names(self, prefix: str) -> set[str]:
        first = prefix.encode()
        kvs = self.store.execute(
            "/kv/range", {"key": first, "range_end": first[:-1] + b"0", "keys_only": True}
        ).get("kvs", ())
        return {self.keys.name_of(kv["key"].decode()) for kv in kvs}
