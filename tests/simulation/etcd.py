"""The simulated etcd with a witness inside: each write is judged the moment it is executed.

Judged: who may write what (fencing of masters), that terms and generations never go back, and that a task of the queue
is in one place only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.etcd.simulated import SimulatedEtcd
from shared.keys import Keys
from shared.records import JobState, MasterAddress, MasterLock, Phase
from tests.simulation.checkpoints import CheckpointWitness
from tests.simulation.network import Network


class WitnessedEtcd(SimulatedEtcd):
    """`violations` grow; `url_of(client)` names the master behind a client."""

    def __init__(self, keys: Keys, network: Network, url_of: Callable[[str], str]) -> None:
        super().__init__(rng=network.rng)
        self._network = network
        self.keys = keys
        self.violations: list[str] = []
        self.state = JobState()
        self.term = 0
        self._url_of = url_of
        self._checkpoints = CheckpointWitness(keys.job)
        self._seen = 0
        self._prefix = keys.prefix.encode()
        self._masters_own = tuple(
            key.encode()
            for key in (
                keys.tasks,
                keys.state,
                keys.spec,
                keys.lanes,
                keys.slots,
                keys.pservers_desired,
                keys.master_address,
            )
        )

    def delay(self) -> float:
        """The weather's; a slow message may be overtaken by a whole reign."""
        delay = self._network.delay()
        return delay * 4 if delay > 0.5 else delay

    def _serve(self, request: Any) -> None:
        super()._serve(request)
        self._judge(request.client)

    def _judge(self, client: str) -> None:
        events, self._seen = self.store.history[self._seen :], len(self.store.history)
        for event in events:
            kv = event["kv"]
            deleted = event.get("type") == "DELETE"
            if kv["key"].startswith(self._masters_own) and not (deleted and kv["key"].endswith(b"/master/addr")):
                self._check_writer(client, kv["key"].decode())
            if not deleted:
                self._check_order(kv["key"].decode(), kv)
        if any(event["kv"]["key"].startswith(self.keys.tasks.encode()) for event in events):
            self._check_places()

    def _check_writer(self, client: str, key: str) -> None:
        lock = self.value(self.keys.master_lock)
        holder = MasterLock.model_validate_json(lock).url if lock is not None else "nobody"
        if self._url_of(client) != holder:
            self.violations.append(f"{client} wrote {key} while {holder} held the master lock")

    def _check_order(self, key: str, kv: dict[str, Any]) -> None:
        if key == self.keys.state:
            state = JobState.model_validate_json(kv["value"])
            if state.generation < self.state.generation:
                self.violations.append(f"generation went back from {self.state.generation} to {state.generation}")
            if self.state.phase.final and state.phase is not self.state.phase:
                self.violations.append(f"the job left {self.state.phase} for {state.phase}")
            if state.phase is Phase.FAILED:
                self.violations.append(f"the job failed: {state.reason}")
            self.state = state
        elif key == self.keys.latest:
            self.violations += self._checkpoints.judge(kv["value"])
        elif key == self.keys.master_lock:
            self._grow(kv["create_revision"])
        elif key == self.keys.master_address:
            self._grow(MasterAddress.model_validate_json(kv["value"]).term)

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
        kvs = self.store.execute("/kv/range", {"key": first, "range_end": first[:-1] + b"0", "keys_only": True}).get(
            "kvs", ()
        )
        return {self.keys.name_of(kv["key"].decode()) for kv in kvs}
