"""A whole job on this machine: etcd, master(s), parameter servers and trainers as supervised child processes.

    async with LocalCluster(spec, folder) as cluster:        starts everything
        state = await cluster.wait()                         COMPLETED or FAILED; dead children are started
                                                             again meanwhile
                                                             leaving stops everything: trainers first, etcd
                                                             last

No child outlives the cluster, however it ends. How many members and threads it has changes no bit of the
result:

min(cores / 2, bytes of the parameters / 32 MiB) --> parameter servers
cores / members on this host --> threads of each

Both are at least 1. A resize changes the numbers:
ps_desired, trainers of job/spec
    --more--> children started
    --fewer--> trainers get SIGTERM; parameter servers without a place end
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from master_service.store.between_runs import renew, start_again
from trireme.launch.leases import LostLease, LostLeases, Vouching
from trireme.launch.processes import Child, Exit, ForkServer, RestartPolicy, revoke_leases_of
from trireme.launch.resume import Facts, optimizer_in, parameter_bytes, script_digest, write_start
from trireme.launch.run_folder import sockets
from trireme.launch.supervision import GRACE_S, ClusterSettings, SupervisedProcesses
from trireme.view.child_events import ChildEvent
from trireme.view.job_address import OpenJob, client_of, masterless_address
from trireme.view.masterless_client import MasterlessClient
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.platform.runtime.limits import cores
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import CallerError, DeadlineExceeded, PeerError, TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Dispatch, JobSpec, JobState, Phase, Stage
from trireme_shared.protocol.records.assignments import GivenNumbers
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.operations import saves_on_demand

MODULES = {"trainer": "trainer_agent", "pserver": "pserver_service"}
MASTERLESS_TRAINER = "trireme.masterless"
PSERVER_GRACE_S = 15.0  # it may be writing its part of a checkpoint
LEAVING_GRACE_S = 60.0  # of a member that a resize makes leave: a trainer ends its minibatch first
START_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 1.0
FOLLOW_S = 5.0
SPARE_WAIT_S = 365 * 24 * 3600.0  # a parameter server that finds no free index waits as a spare
LOOK_S = 5.0
PAUSE_S = 0.5
BYTES_EACH = 32 << 20
MOST = 128


class LocalCluster(SupervisedProcesses[JobState]):
    """`folder` gets spec.json, logs/<child>.log, children.jsonl and etcd/ (an earlier run's etcd data is used
    again). Spare parameter servers are loaded and wait; the first that sees a free index takes it. `forks`
    starts the children (None: the cluster makes its own fork server and ends it). `accepted`: facts of the
    script's model, if hyperparameters have changed and its user accepts that.

    `on_event` gets every start and death. Children by name: `trainer-0`, `pserver-0`, `master-0`, `etcd`.
    """

    # masters stop before parameter servers, or a master would roll the job back
    # never changed
    grace_s = {"trainer": GRACE_S, "master": GRACE_S, "pserver": PSERVER_GRACE_S}  # noqa: RUF012
    ends_with = (CallerError,)  # there is no other job

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        settings: ClusterSettings | None = None,
        *,
        spare_pservers: int = 0,
        forks: ForkServer | None = None,
        accepted: Facts | None = None,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        self._forks = forks or ForkServer()
        self._own_forks = forks is None
        super().__init__(folder, settings or ClusterSettings(), self._forks.start, on_event)
        self.spec = spec
        self._spare_pservers, self._accepted = spare_pservers, accepted
        self._keys = Keys(spec.job)
        self._pserver_settings: dict[str, str] = {}
        self._uds = ""
        self.numbers = MemberNumbers(spec, self.children, spare_pservers)
        self.lost_leases = LostLeases(spec.lease_ttl_s)
        self._masterless_client: MasterlessClient | None = None
        self.masterless = spec.dispatch is Dispatch.ETCD
        self.directory: Directory

    def __repr__(self) -> str:
        alive = sum(child.alive for child in self.children.values())
        return (
            f"<LocalCluster {self.spec.job}: {alive} of {len(self.children)} children alive, "
            f"{self.embedded!r}>"
        )

    # ------------------------------------------------------------ for tests and the command line

    async def wait(self, timeout_s: float | None = None) -> JobState:
        """The job's last state, COMPLETED or FAILED. Raises ClusterError if the job can never end,
        DeadlineExceeded."""
        return await self._until_final(
            timeout_s,
            lambda: f"job {self.spec.job} is not over after {timeout_s:g} s: {self.directory.state!r}",
        )

    @property
    def url(self) -> str:
        """The leading master's, "" while there is none; for a masterless job its address in etcd."""
        if self.masterless:
            return masterless_address(",".join(self.etcd_access.urls), self.spec.job)
        return self.directory.master.url if self.directory.master else ""

    @property
    def way_without_etcd(self) -> str:
        return (
            "the job's checkpoints do not depend on it: the same command with another --job and `--init-from "
            f"{self.spec.job}` begins with the newest one, and with --fresh it begins from nothing"
        )

    @asynccontextmanager
    async def client(self, timeout_s: float) -> AsyncIterator[OpenJob]:
        """A client of the leading master, or of etcd in a masterless job. Raises DeadlineExceeded."""
        if self._masterless_client is not None:
            yield self._masterless_client, self.spec.job
            return
        async with client_of(await self.master_url(timeout_s), self.settings.token, timeout_s) as client:
            yield client, self.spec.job

    async def master_url(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Raises DeadlineExceeded if no master leads within `timeout_s`, ClusterError if the job can never
        end."""
        deadline = clock.monotonic() + timeout_s
        while self.directory.master is None:  # also after the wait: it may be gone again by then
            left_s = deadline - clock.monotonic()
            await self._unless_over(
                self.directory.wait_for(lambda view: view.master is not None, left_s, "a master")
            )
        return self.directory.master.url

    @property
    def is_training(self) -> bool:
        """Whether a checkpoint of the job can be asked for now."""
        state = self.directory.state
        if state is None or state.stage is not Stage.TRAIN or not saves_on_demand(self.spec):
            return False
        return state.phase in {Phase.RUNNING, Phase.CHECKPOINTING}

    @property
    def can_save(self) -> bool:
        """Whether whom a checkpoint needs is alive: a trainer, a master and etcd."""
        roles = ("trainer",) if self.masterless else ("trainer", "master")
        alive = all(any(child.alive for child in self._of(role)) for role in roles)
        return alive and (self.settings.etcd is not None or self.embedded.running)

    async def saved_step(self) -> int | None:
        """The step of the newest checkpoint, 0 if only its number in the job is known; None if there is none.
        Raises PeerError."""
        latest = await self.etcd.get(self._keys.latest)
        if latest is not None:
            return must_read(CheckpointLatest, latest.key, latest.value).step
        return 0 if (await self.etcd.range(self._keys.own_prefix, prefix=True, keys_only=True)).kvs else None

    async def add_trainer(self) -> Child:
        return await self._add_member("trainer")

    # ------------------------------------------------------------ children

    def _common(self) -> dict[str, str]:
        return {
            **super()._common(),
            "TRIREME_JOB": self.spec.job,
            "TRIREME_SPEC": str(self.folder / "spec.json"),
        }

    async def _add_member(self, role: str) -> Child:
        """A trainer or a parameter server."""
        module = MASTERLESS_TRAINER if self.masterless and role == "trainer" else MODULES[role]
        own = self._pserver_settings if role == "pserver" else {}
        return await self._add(role, module, {"TRIREME_UDS": self._uds, **own})

    def _lost_lease(self, end: Exit) -> LostLease | None:
        return self.lost_leases.ended(end.pid)

    def _restarts(self, child: Child) -> RestartPolicy:
        return RestartPolicy() if child.name.startswith("master-") else RestartPolicy.of(self.spec)

    def _why_not_without(self, child: Child) -> str:
        role = child.name.partition("-")[0]
        left = sum(other.name not in self._not_again for other in self.numbers.kept(role))
        needed = self.spec.pservers if role == "pserver" else self.spec.min_members
        if left >= needed:
            return ""
        return f"{left} of the job's {role}s are left, and it needs {needed} at least"

    async def _is_over(self, child: Child, end: Exit) -> bool:
        if not self._all_over and self.numbers.is_surplus(child, self.directory):
            await self._mourn(child, end)
            return True
        return self._all_over or (end.code == 0 and await self._is_final())

    def _is_unwanted(self, child: Child) -> bool:
        return self.numbers.has_left(child)

    @property
    def _all_over(self) -> bool:
        return _is_final(self.directory.state)

    async def _grow(self, role: str) -> None:
        """One more of a kind: one that left before, or a new one."""
        child = self.numbers.comes_back(role, self._supervised)
        if child is None:
            await self._add_member(role)
            return
        await child.start()
        self._record(ChildEvent(child.name, "started", pid=child.pid))
        self._supervise_beside(child)

    async def _leave(self, child: Child) -> None:
        await child.end(LEAVING_GRACE_S)

    async def _end_the_silent(self) -> None:
        """Kill children that have lost their lease and do not end by themselves; they are started again as
        any other."""

        def alive() -> dict[str, int]:
            over = _is_final(self.directory.state)
            return {name: child.pid for name, child in self.children.items() if child.alive and not over}

        def trainers() -> dict[str, Child]:
            return {name: child for name, child in self.children.items() if name in alive()}

        def held_up(name: str, pid: int, cause: str) -> None:
            self._record(ChildEvent(name, "held_up", cause, pid))

        async with LongLivedGroup() as group:
            group.create_task(Vouching(self.etcd, held_up).run(trainers))
            group.create_task(self.lost_leases.follow(self.etcd, self._keys, alive, self.kill))

    async def _is_final(self) -> bool:
        """Whether the job is over. Waits a moment for the news: a trainer may leave before it arrives
        here."""
        with contextlib.suppress(DeadlineExceeded):
            await self.directory.wait_for(
                lambda view: _is_final(view.state), FINAL_TIMEOUT_S, "the end of the job"
            )
        return _is_final(self.directory.state)

    async def _mourn(self, child: Child, end: Exit) -> None:
        """Revoke its leases, so that no member waits until they expire. The launcher saw the death, so no
        master needs to confirm it by a probe."""
        try:
            await revoke_leases_of(self.etcd, self._keys, child.name, end.pid)
        except (TriremeError, TimeoutError) as error:  # etcd is away: the leases expire by themselves
            self._record(ChildEvent(child.name, "lease_left", f"{type(error).__name__}: {error}", end.pid))

    # ------------------------------------------------------------ start and end

    async def _start(self) -> None:
        if self._own_forks:
            self._opened.enter_context(self._forks)
        await self._connect(self._keys.prefix)
        await start_again(self.etcd, self._keys)
        await renew(self.etcd, self._keys, self.spec, optimizer=optimizer_in(self._accepted))
        private_files.write_text(self.folder / "spec.json", self.spec.to_bytes().decode())  # masters read it
        if self._accepted is not None:
            write_start(self.folder, script_digest(Path(self.spec.script)), self._accepted)
        self.directory = Directory(self.etcd, self._keys)
        self.run_beside(self.directory.run, "following the job")
        self.run_beside(self._follow_state, "waiting for the end of the job")
        self.run_beside(self._end_the_silent, "watching leases")
        if self.masterless:
            self._masterless_client = MasterlessClient(self.etcd, self._keys)
            self.run_beside(self._masterless_client.run, "following the queue")
        if not self.masterless:
            await self._add_masters({}, "logs")
        threads = os.environ.get("TRIREME_THREADS") or str(threads_for(self.spec, cores()))
        folder = self._opened.enter_context(sockets(self.folder))
        self._uds = f"{folder.path}/"
        self.run_beside(folder.keep, "keeping sockets")
        self._pserver_settings = {"TRIREME_THREADS": threads}
        if self._spare_pservers:
            self._pserver_settings["TRIREME_CLAIM_WAIT_S"] = str(SPARE_WAIT_S)
        for _ in range(self.spec.pservers + self._spare_pservers):
            await self._add_member("pserver")
        for _ in range(self.spec.trainers):
            await self._add_member("trainer")
        if not self.masterless:  # only now, or it would start members that are about to be started here
            follow = partial(self.numbers.follow, self.etcd, self.directory, self._grow, self._leave)
            self.run_beside(follow, "following the numbers of members")

    async def _news(self) -> None:
        await self.directory.changed(self.directory.revision, FOLLOW_S)

    async def _follow_state(self) -> None:
        revision = 0
        while not _is_final(self.directory.state):
            await self.directory.changed(revision, FOLLOW_S)
            revision = self.directory.revision
            with contextlib.suppress(OSError):
                self._events.write_waiting()
        if self.directory.state is not None and not self.final.done():
            self.final.set_result(self.directory.state)


def _is_final(state: JobState | None) -> bool:
    return state is not None and state.phase.final


def pservers_for(model: Facts | None, cores: int) -> int:
    """`model` None (--no-check): 1."""
    size = 0 if model is None else parameter_bytes(model)
    return max(1, min(cores // 2, size // BYTES_EACH, MOST))


def threads_for(spec: JobSpec, cores: int) -> int:
    """Of each parameter server, if all members are on this host: so many that together they have no more
    threads than cores."""
    return max(1, cores // (spec.pservers + spec.trainers * spec.threads_per_trainer))


class MemberNumbers:
    """`children`: all of the run, by name. A child that left stays among them and may be started again."""

    def __init__(self, spec: JobSpec, children: Mapping[str, Child], spare_pservers: int = 0) -> None:
        self._spec, self._children, self._spares = spec, children, spare_pservers
        self._left: set[str] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<MemberNumbers: {len(self.kept('pserver'))} pservers, {len(self.kept('trainer'))} trainers>"

    def kept(self, role: str) -> list[Child]:
        """Those that have not left, in the order of their numbers."""
        found = [child for name, child in self._children.items() if name.startswith(f"{role}-")]
        return [child for child in found if child.name not in self._left]

    def has_left(self, child: Child) -> bool:
        return child.name in self._left

    def comes_back(self, role: str, supervised: Collection[str]) -> Child | None:
        """One that left and has ended, unless its end is still being seen to: who is `supervised` may be
        about to be started. It counts again."""
        for name in sorted(self._left):
            child = self._children[name]
            if name.startswith(f"{role}-") and not child.alive and name not in supervised:
                self._left.discard(name)
                return child
        return None

    def is_surplus(self, child: Child, directory: Directory) -> bool:
        """A child has ended: whether it is not started again, because the job wants fewer."""
        if child.name in self._left:
            return True
        wanted = self._pservers_wanted(directory)
        surplus = (
            child.name.startswith("pserver-") and wanted is not None and len(self.kept("pserver")) > wanted
        )
        if surplus and child.pid not in _pids(directory):
            self._left.add(child.name)
            return True
        return False

    async def follow(
        self,
        etcd: Etcd,
        directory: Directory,
        grow: Callable[[str], Awaitable[None]],
        leave: Callable[[Child], Awaitable[None]],
    ) -> None:
        """Until cancelled. `grow(role)` starts one more child, `leave(child)` ends one."""
        await self._own_numbers(etcd, directory)
        trainers = self._spec.trainers
        while True:
            revision = directory.revision
            wanted = self._pservers_wanted(directory)
            for _ in range(len(self.kept("pserver")), wanted or 0):
                await grow("pserver")
            if directory.spec is not None and directory.spec.trainers != trainers:
                trainers = directory.spec.trainers
                for _ in range(len(self.kept("trainer")), trainers):
                    await grow("trainer")
                for child in self.kept("trainer")[trainers:]:
                    self.end(child, leave)
            placed = _pids(directory)
            surplus = [child for child in self.kept("pserver") if child.alive and child.pid not in placed]
            for child in surplus[: max(0, len(self.kept("pserver")) - wanted)] if wanted is not None else ():
                self.end(child, leave)
            await directory.changed(revision, LOOK_S)

    def end(self, child: Child, leave: Callable[[Child], Awaitable[None]]) -> None:
        """It is not needed any more; `leave` ends it."""
        self._left.add(child.name)
        ending = asyncio.ensure_future(leave(child))
        self._leaving.add(ending)
        ending.add_done_callback(self._leaving.discard)

    def _pservers_wanted(self, directory: Directory) -> int | None:
        desired = directory.pservers_desired
        return None if desired is None else desired + self._spares

    async def _own_numbers(self, etcd: Etcd, directory: Directory) -> None:
        """Wait until the numbers in etcd are this run's, or follow from them by a resize; before, they are an
        earlier run's."""
        mine = self._spec.trainers, self._spec.pservers
        while True:
            revision, spec = directory.revision, directory.spec
            if directory.master is not None and spec is not None:
                if (spec.trainers, spec.pservers) == mine:
                    return
                try:
                    found = await etcd.get(directory.keys.given)
                except PeerError:
                    await asyncio.sleep(ids.jitter(PAUSE_S))
                    continue
                given = read_record(GivenNumbers, directory.keys.given, found.value if found else None)
                if given is not None and (given.trainers, given.pservers) == mine:
                    return
            await directory.changed(revision, PAUSE_S)


def _pids(directory: Directory) -> set[int]:
    """Of the parameter servers that have a place."""
    return {member.pid for member in directory.pservers.values()}
