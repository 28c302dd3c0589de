"""AsyncClient without its awaits, for notebooks and scripts. `make clients` derives this file from
asynchronous.py: change that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self, TypeVar

import httpx
from pydantic import BaseModel

from trireme.client.exchange import (
    AGENT,
    LONG_POLL_S,
    POLL_S,
    Attempts,
    Call,
    EventGap,
    Listing,
    Masters,
    Wait,
    body_of,
    get,
    given_token,
    has_ended,
    path_in,
    path_of,
    post,
    result_of,
)
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import Conflict, CursorExpired, TriremeError
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.records import TaskKind, TaskSummary
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import Operation, OperationState, ResizePrediction, Strategy
from trireme_shared.protocol.rest import (
    CheckpointDetails,
    CheckpointPage,
    CheckpointView,
    CreateCheckpoint,
    CreateResize,
    Empty,
    EvaluationPage,
    EventPage,
    JobPage,
    JobView,
    Login,
    LoginCode,
    LogLine,
    LogLines,
    LogPage,
    LogView,
    MemberPage,
    MemberView,
    MetricPage,
    MetricPoint,
    OperationPage,
    ResizePage,
    ResizeView,
    SeriesPage,
    SeriesPoints,
    SeriesSummary,
    TaskPage,
    TaskView,
    TokenAccess,
    Version,
)
from trireme_shared.protocol.rest_cluster import (
    CreateJob,
    CreateSchedule,
    JobSource,
    JobTaskPage,
    PoolMemberPage,
    PoolMemberView,
    PoolView,
    SchedulePage,
    ScheduleView,
)

TIMEOUT_S = 15.0
TaskState = Literal["TODO", "PENDING", "REQUEUED", "DONE", "DISCARDED"]

R = TypeVar("R", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")


class Client:
    """Each call raises the TriremeError of the master's answer, PeerError if nobody can be reached,
    DeadlineExceeded if nobody answers. `with` closes the client. `job` in a call is a job's name, or
    ONLY_JOB at a master that has only one.

    `urls`: the address of a master or a cluster's leader, or several addresses separated by commas.
    `token`: None takes TRIREME_TOKEN, or the content of TRIREME_TOKEN_FILE.
    `timeout_s`: how many seconds a call may take, with its repetitions.
    `tls`: the authority that is trusted, and the own certificate; None takes the TRIREME_TLS_* variables.
    `wait_for_leader`: a call is sent again, with the same Idempotency-Key, while no master leads or none can
    be reached. False: that error is raised at once, and a call is sent again only while the master that was
    asked takes over.
    """

    def __init__(
        self,
        urls: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls: Tls | None = None,
        wait_for_leader: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._masters = Masters(urls)
        self._timeout_s = timeout_s
        self._wait_for_leader = wait_for_leader
        given = given_token() if token is None else token
        headers = {"User-Agent": AGENT} | ({"Authorization": f"Bearer {given}"} if given else {})
        trusted = (tls or Tls.from_environment()).client() or True
        self._http = httpx.Client(headers=headers, verify=trusted, trust_env=False, transport=transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        """The address that calls go to now."""
        return self._masters.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ---------------------------------------------------------------- jobs

    def create_job(self, job: CreateJob, *, key: str = "") -> JobView:
        """Queue a job in a cluster. The same `key` (Idempotency-Key) is the same job, here and in all other
        calls."""
        return self._send(post(path_of("jobs"), JobView, key, job))

    def list_jobs(self, *, state: Standing | None = None, newest_first: bool = False) -> Iterator[JobView]:
        """All jobs, or those with one standing, in the order of their submission, or against it; without what
        only `get_job` tells."""
        query = {"state": state, "newest_first": "true" if newest_first else None}
        return self._list(
            Listing(path_of("jobs"), JobPage, lambda page: (page.jobs, page.next_page_token), query)
        )

    def get_job(self, job: str) -> JobView:
        return self._send(get(path_in(job), JobView))

    def explain_job(self, job: str) -> Explanation:
        """Why the job does not progress, and what to do."""
        return self._send(get(path_in(job, "explanation"), Explanation))

    def get_job_source(self, job: str) -> JobSource:
        return self._send(get(path_of("jobs", job, "source"), JobSource))

    def list_job_tasks(self, job: str) -> JobTaskPage:
        """The job's pre-tasks and post-tasks, and what they printed."""
        return self._send(get(path_of("jobs", job, "job-tasks"), JobTaskPage))

    def pause_job(self, job: str, *, wait_s: float = 0.0, key: str = "", if_match: str = "") -> Operation:
        """The job saves a checkpoint and frees its members. Waits up to `wait_s` (at most 30) seconds for
        that; `wait_for_operation` waits longer. `if_match`, here and in other calls: the `version` of the
        record that was read; raises PreconditionFailed if it has another one by then."""
        return self._send(self._asked(job, "pause", wait_s, key, if_match))

    def resume_job(self, job: str, *, wait_s: float = 0.0, key: str = "", if_match: str = "") -> Operation:
        """The job is queued again; the operation is DONE then."""
        return self._send(self._asked(job, "resume", wait_s, key, if_match))

    def cancel_job(self, job: str, *, wait_s: float = 0.0, key: str = "", if_match: str = "") -> Operation:
        """The job stops for good, without a checkpoint of its last steps."""
        return self._send(self._asked(job, "cancel", wait_s, key, if_match))

    def delete_job(self, job: str, *, wait_s: float = 0.0, if_match: str = "") -> Operation:
        """Begin to delete a job that has ended, and its files. The operation outlives the job. NotFound may
        mean that an attempt whose answer was lost has deleted it."""
        path, query = path_of("jobs", job), {"wait_s": wait_s}
        return self._send(Call("DELETE", path, Operation, query, wait_s=wait_s, if_match=if_match))

    def _asked(self, job: str, verb: str, wait_s: float, key: str, if_match: str) -> Call[Operation]:
        path = path_of("jobs", job, verb)
        return post(path, Operation, key, query={"wait_s": wait_s}, if_match=if_match)

    def wait_for_job(
        self, job: str, until: Callable[[JobView], bool] = has_ended, *, timeout_s: float = 600.0
    ) -> JobView:
        """The job once `until` holds: by default once it has ended, however it did. Raises DeadlineExceeded
        after `timeout_s`, and Conflict if it has ended and `until` cannot hold any more."""
        wait = Wait(f"job {job}", timeout_s, clock.monotonic())
        while True:
            found = self.get_job(job)
            if until(found):
                return found
            if has_ended(found):
                raise Conflict(f"job {job} is {found.state}, and not as it was waited for: {found.reason}")
            clock.sleep(wait.pause(POLL_S, f"{found.state}: {found.reason}", clock.monotonic()))

    # ---------------------------------------------------------------- inside one job

    def list_tasks(
        self,
        job: str,
        *,
        state: TaskState | None = None,
        kind: TaskKind = TaskKind.TRAIN,
        page_size: int = 500,
    ) -> Iterator[TaskView]:
        """Tasks of the current epoch (DISCARDED: of all), page by page as they are consumed."""
        path, query = path_in(job, "tasks"), {"state": state, "kind": kind, "page_size": page_size}
        return self._list(Listing(path, TaskPage, lambda page: (page.tasks, page.next_page_token), query))

    def get_task(self, job: str, task_id: str) -> TaskView:
        return self._send(get(path_in(job, "tasks", task_id), TaskView))

    def retry_task(self, job: str, task_id: str, *, key: str = "") -> TaskView:
        """Try a discarded task of the current epoch again; synchronous jobs cannot."""
        return self._send(post(path_in(job, "tasks", task_id, "retry"), TaskView, key))

    def skip_task(self, job: str, task_id: str, *, key: str = "") -> TaskView:
        """Discard a task without more attempts; that of a synchronous job once its present attempt fails."""
        return self._send(post(path_in(job, "tasks", task_id, "skip"), TaskView, key))

    def get_task_summary(self, job: str) -> TaskSummary:
        """Counts of the current stage."""
        return self._send(get(path_in(job, "task-summary"), TaskSummary))

    def list_members(self, job: str) -> Iterator[MemberView]:
        return self._list(
            Listing(path_in(job, "members"), MemberPage, lambda page: (page.members, page.next_page_token))
        )

    def get_member(self, job: str, member_id: str) -> MemberView:
        return self._send(get(path_in(job, "members", member_id), MemberView))

    def create_checkpoint(
        self, job: str, *, cause: str = "", limit_s: float = 600.0, wait_s: float = 0.0, key: str = ""
    ) -> Operation:
        """Begin a checkpoint, and wait up to `wait_s` (at most 30) seconds for its end; `wait_for_operation`
        waits longer."""
        asked = body_of(CreateCheckpoint, cause=cause, limit_s=limit_s)
        return self._send(post(path_in(job, "checkpoints"), Operation, key, asked, {"wait_s": wait_s}))

    def list_checkpoints(self, job: str) -> Iterator[CheckpointView]:
        """The checkpoints that are kept, the newest first."""
        path = path_in(job, "checkpoints")
        return self._list(
            Listing(path, CheckpointPage, lambda page: (page.checkpoints, page.next_page_token))
        )

    def get_checkpoint(self, job: str, checkpoint_id: str) -> CheckpointDetails:
        return self._send(get(path_in(job, "checkpoints", checkpoint_id), CheckpointDetails))

    def verify_checkpoint(
        self, job: str, checkpoint_id: str, *, wait_s: float = 0.0, key: str = ""
    ) -> Operation:
        """Begin to read every part of a checkpoint, and to compare it with its checksum."""
        path = path_in(job, "checkpoints", checkpoint_id, "verify")
        return self._send(post(path, Operation, key, query={"wait_s": wait_s}))

    def restore_checkpoint(
        self, job: str, checkpoint_id: str, *, wait_s: float = 0.0, key: str = ""
    ) -> Operation:
        """The whole job goes back to that step and continues from there."""
        path = path_in(job, "checkpoints", checkpoint_id, "restore")
        return self._send(post(path, Operation, key, query={"wait_s": wait_s}))

    def create_resize(
        self,
        job: str,
        *,
        trainers: int | None = None,
        pservers: int | None = None,
        strategy: Strategy = Strategy.LIVE,
        cause: str = "",
        limit_s: float = 600.0,
        wait_s: float = 0.0,
        key: str = "",
    ) -> Operation:
        """Other numbers of members while it trains; None: as many as now. `wait_for_resize` (or
        `wait_for_operation`) waits for its end."""
        wanted = {"trainers": trainers, "pservers": pservers, "strategy": strategy}
        body = body_of(CreateResize, **wanted, cause=cause, limit_s=limit_s)
        return self._send(post(path_in(job, "resizes"), Operation, key, body, {"wait_s": wait_s}))

    def predict_resize(
        self,
        job: str,
        *,
        trainers: int | None = None,
        pservers: int | None = None,
        strategy: Strategy = Strategy.LIVE,
    ) -> ResizePrediction:
        """What a resize would move; nothing changes."""
        path = path_in(job, "resize-prediction")
        return self._send(
            get(path, ResizePrediction, trainers=trainers, pservers=pservers, strategy=strategy)
        )

    def list_resizes(self, job: str) -> Iterator[ResizeView]:
        """What runs and what ended last, newest first."""
        return self._list(
            Listing(path_in(job, "resizes"), ResizePage, lambda page: (page.resizes, page.next_page_token))
        )

    def get_resize(self, job: str, resize_id: str, *, wait_s: float = 0.0) -> ResizeView:
        return self._send(get(path_in(job, "resizes", resize_id), ResizeView, wait_s=wait_s))

    def cancel_resize(self, job: str, resize_id: str, *, key: str = "") -> ResizeView:
        """End a resize; what has moved stays where it is."""
        return self._send(post(path_in(job, "resizes", resize_id, "cancel"), ResizeView, key))

    def wait_for_resize(self, job: str, resize_id: str, *, timeout_s: float = 600.0) -> ResizeView:
        """Wait until it is DONE. Raises the error it FAILED with; DeadlineExceeded after `timeout_s` (it goes
        on)."""
        wait = Wait(f"resize {resize_id}", timeout_s, clock.monotonic())
        while True:
            found = self.get_resize(job, resize_id, wait_s=wait.left(LONG_POLL_S, clock.monotonic()))
            if found.state is not OperationState.RUNNING:
                return result_of(found)
            wait.check(found.reason, clock.monotonic())

    def list_operations(self, job: str, *, state: OperationState | None = None) -> Iterator[Operation]:
        """What runs and what ended last, newest first."""
        path, query = path_in(job, "operations"), {"state": state}
        return self._list(
            Listing(path, OperationPage, lambda page: (page.operations, page.next_page_token), query)
        )

    def get_operation(self, job: str, operation_id: str, *, wait_s: float = 0.0) -> Operation:
        return self._send(get(path_in(job, "operations", operation_id), Operation, wait_s=wait_s))

    def wait_for_operation(self, job: str, operation_id: str, *, timeout_s: float = 600.0) -> Operation:
        """Wait until it is DONE. Raises the error it FAILED with; DeadlineExceeded after `timeout_s` (it goes
        on)."""
        wait = Wait(f"operation {operation_id}", timeout_s, clock.monotonic())
        while True:
            found = self.get_operation(job, operation_id, wait_s=wait.left(LONG_POLL_S, clock.monotonic()))
            if found.state is not OperationState.RUNNING:
                return result_of(found)
            wait.check(found.reason, clock.monotonic())

    def list_events(
        self, job: str, *, after: int = 0, wait_s: float = 0.0, page_size: int = 100
    ) -> EventPage:
        """One page of events; `next_after` is the `after` of the next page. Waits up to `wait_s` (at most 30)
        seconds for an event."""
        return self._send(
            get(path_in(job, "events"), EventPage, after=after, wait_s=wait_s, page_size=page_size)
        )

    def list_cluster_events(self, *, after: int = 0, wait_s: float = 0.0, page_size: int = 100) -> EventPage:
        """One page of events of leaders, jobs, members and schedules; the arguments are those of
        `list_events`."""
        return self._send(
            get(path_of("cluster", "events"), EventPage, after=after, wait_s=wait_s, page_size=page_size)
        )

    def follow_events(
        self, job: str, *, after: int = 0, on_gap: Callable[[EventGap], object] | None = None
    ) -> Iterator[EventRecord]:
        """Events as they happen, also while one master takes over from another, until the job has ended. If
        some were forgotten before they were read, `on_gap` is told, and it goes on with the oldest that is
        kept. Raises CursorExpired without it: `details` has `lost` (how many) and `resume_after`."""
        ended = False
        while True:
            try:
                page = self.list_events(job, after=after, wait_s=0.0 if ended else LONG_POLL_S)
            except CursorExpired as error:
                gap = EventGap.of(after, error)
                if on_gap is None:
                    raise gap.error from error
                on_gap(gap)
                after = gap.resume_after
                continue
            yield from page.events
            after = page.next_after
            if not page.events:
                if ended:
                    return
                ended = has_ended(self.get_job(job))

    def list_logs(self, job: str) -> Iterator[LogView]:
        """Logs of the job's members on the master's host, those of dead members too."""
        path, query = path_in(job, "logs"), {"page_size": 1000}
        return self._list(Listing(path, LogPage, lambda page: (page.logs, page.next_page_token), query))

    def get_log(
        self,
        job: str,
        log: str,
        *,
        after: int | None = None,
        before: int | None = None,
        tail: int = 100,
        wait_s: float = 0.0,
    ) -> LogLines:
        """The last `tail` lines; with `after` what was written since, for which it waits up to `wait_s` (at
        most 30) seconds. `next_after` and `next_before` of the answer lead to the rest."""
        path, place = path_in(job, "logs", log), {"after": after, "before": before}
        return self._send(get(path, LogLines, **place, tail=tail, wait_s=wait_s))

    def follow_log(
        self, job: str, log: str, *, after: int | None = None, tail: int = 100
    ) -> Iterator[LogLine]:
        """The last lines and what comes, also while one master takes over from another, until the job has
        ended."""
        page = self.get_log(job, log, after=after, tail=tail)
        ended = False
        while True:
            yield from page.lines
            if not page.lines and page.next_after == after:
                if ended:
                    return
                ended = has_ended(self.get_job(job))
            after = page.next_after
            page = self.get_log(job, page.log, after=after, wait_s=0.0 if ended else LONG_POLL_S)

    def list_metrics(self, job: str, *, metric: str = "step_loss") -> Iterator[MetricPoint]:
        """`step_loss` or `epoch_loss`, the oldest first."""
        path, query = path_in(job, "metrics"), {"metric": metric, "page_size": 1000}
        return self._list(Listing(path, MetricPage, lambda page: (page.points, page.next_page_token), query))

    def list_metric_series(self, job: str) -> Iterator[SeriesSummary]:
        """The metrics that are kept by step: `loss`, what the script logs, `lr`, `time.*`, `evaluation.*`,
        ..."""
        path = path_in(job, "metric-series")
        return self._list(Listing(path, SeriesPage, lambda page: (page.series, page.next_page_token)))

    def query_metric(
        self,
        job: str,
        name: str,
        *,
        from_step: int = 0,
        to_step: int | None = None,
        points: int = 500,
        by: str = "step",
    ) -> SeriesPoints:
        """A metric by step; several steps share a point where there are more of them than `points`.
        `by="epoch"`: of a synchronous job."""
        path, steps = path_in(job, "metric-series", name), {"from_step": from_step, "to_step": to_step}
        return self._send(get(path, SeriesPoints, **steps, points=points, by=by))

    def list_evaluations(self, job: str) -> Iterator[Evaluation]:
        """The evaluations that were done while the job trained, the newest first."""
        path = path_in(job, "evaluations")
        return self._list(
            Listing(path, EvaluationPage, lambda page: (page.evaluations, page.next_page_token))
        )

    # ---------------------------------------------------------------- cluster, pool, schedules, version

    def get_pool(self) -> PoolView:
        return self._send(get(path_of("pool"), PoolView))

    def list_pool_members(self) -> Iterator[PoolMemberView]:
        path = path_of("pool-members")
        return self._list(Listing(path, PoolMemberPage, lambda page: (page.members, page.next_page_token)))

    def get_pool_member(self, member: str) -> PoolMemberView:
        return self._send(get(path_of("pool-members", member), PoolMemberView))

    def drain_pool_member(self, member: str, *, key: str = "", if_match: str = "") -> PoolMemberView:
        """Give the member no work until it is undrained."""
        path = path_of("pool-members", member, "drain")
        return self._send(post(path, PoolMemberView, key, if_match=if_match))

    def undrain_pool_member(self, member: str, *, key: str = "", if_match: str = "") -> None:
        self._send(post(path_of("pool-members", member, "undrain"), Empty, key, if_match=if_match))

    def create_schedule(self, schedule: CreateSchedule, *, key: str = "") -> ScheduleView:
        return self._send(post(path_of("schedules"), ScheduleView, key, schedule))

    def list_schedules(self) -> Iterator[ScheduleView]:
        path = path_of("schedules")
        return self._list(Listing(path, SchedulePage, lambda page: (page.schedules, page.next_page_token)))

    def get_schedule(self, schedule: str) -> ScheduleView:
        return self._send(get(path_of("schedules", schedule), ScheduleView))

    def delete_schedule(self, schedule: str, *, if_match: str = "") -> ScheduleView:
        return self._send(Call("DELETE", path_of("schedules", schedule), ScheduleView, if_match=if_match))

    def get_access(self) -> TokenAccess:
        """What the token of this client may do."""
        return self._send(get(path_of("access"), TokenAccess))

    def create_login_code(self, *, key: str = "") -> LoginCode:
        """A code that a browser exchanges for the token of this client, once, at the master that made it:
        `http://HOST:PORT/#/login/CODE`."""
        return self._send(post(path_of("login-codes"), LoginCode, key))

    def create_login(self, *, key: str = "") -> Login:
        """The token for a login code, which this client was made with in the place of a token."""
        return self._send(post(path_of("logins"), Login, key))

    def get_version(self) -> Version:
        return self._send(get(path_of("version"), Version))

    # ---------------------------------------------------------------- sending

    def _list(self, listing: Listing[P, T]) -> Iterator[T]:
        token = ""
        while True:
            items, token = listing.split(self._send(listing.call(token)))
            yield from items
            if not token:
                return

    def _send(self, call: Call[R]) -> R:
        now = clock.monotonic()
        attempts = Attempts(self._masters, call, self._timeout_s, now, wait_for_leader=self._wait_for_leader)
        while True:
            try:
                return call.read(self._http.send(attempts.request(self._http, clock.monotonic())))
            except httpx.TransportError as error:
                told = attempts.told(error)
                told.__cause__ = error
            except TriremeError as error:
                told = error
            clock.sleep(attempts.failed(told, clock.monotonic()))
