"""Links of the document: which operation can follow from an answer, and which of its values it takes.

    createJob ─► every operation about the job ─► createCheckpoint ─► getOperation
    a list ─► its next page, and what can be asked about its first item

They tell users and tools how operations belong together; schemathesis follows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

OF_A_JOB = re.compile(r"/v1/jobs/\{job\}[^{}]*")  # asks for nothing but the job's name


@dataclass(frozen=True, slots=True)
class Follows:
    """`target` can be asked after `source`. `parameters`, `body`: name -> expression of OpenAPI. `about`: what it is asked about."""

    source: str
    target: str
    about: str
    parameters: dict[str, str]
    body: dict[str, str] = field(default_factory=dict)


def _of(name: str, pointer: str, about: str, sources: str, targets: str) -> list[Follows]:
    """From each of `sources` to each of `targets`, with a parameter from the answer, in the same job if it has one."""
    return [
        Follows(source, target, about, {name: f"$response.body#/{pointer}"})
        for source in sources.split()
        for target in targets.split()
    ]


def _unchanged(name: str, about: str, source: str, targets: str) -> list[Follows]:
    parameters = {name: f"$request.path.{name}", "If-Match": "$response.header.ETag"}
    return [Follows(source, target, about, parameters) for target in targets.split()]


_HELD = {
    "trainer": "$request.body#/trainer",
    "attempt": "$response.body#/task/attempt",
    "epoch": "$response.body#/task/epoch",
    "timeline": "$response.body#/task/timeline",
}
FOLLOWS = [
    *_unchanged("job", "the job, if nobody has changed it since", "getJob", "pauseJob resumeJob cancelJob deleteJob"),
    *_unchanged("schedule", "the schedule, if nobody has changed it since", "getSchedule", "deleteSchedule"),
    *_unchanged(
        "member",
        "the member, if nobody has changed it since",
        "getPoolMember",
        "drainPoolMember undrainPoolMember",
    ),
    *_of("job", "job", "the same job", "pauseJob", "resumeJob cancelJob"),
    *_of("job", "job", "the same job", "cancelJob", "deleteJob"),
    *_of("schedule", "name", "the schedule", "createSchedule", "getSchedule deleteSchedule"),
    *_of("schedule", "schedules/0/name", "the first schedule", "listSchedules", "getSchedule deleteSchedule"),
    *_of(
        "member",
        "members/0/member_id",
        "the first member",
        "listPoolMembers",
        "getPoolMember drainPoolMember undrainPoolMember",
    ),
    *_of("member", "member_id", "the same member", "drainPoolMember", "undrainPoolMember"),
    *_of("task_id", "tasks/0/task_id", "the first task", "listTasks", "getTask retryTask skipTask"),
    *_of("task_id", "task_id", "the same task", "skipTask", "retryTask"),
    *_of("log", "logs/0/log", "the first log", "listLogs", "getLog"),
    *_of(
        "member_id", "members/0/member_id", "the first member", "listMembers", "getMember reportSuspect reportFailure"
    ),
    *_of(
        "checkpoint_id",
        "checkpoints/0/checkpoint_id",
        "the newest checkpoint",
        "listCheckpoints",
        "getCheckpoint verifyCheckpoint restoreCheckpoint",
    ),
    *_of(
        "operation_id",
        "operation_id",
        "the operation that was begun",
        "createCheckpoint verifyCheckpoint restoreCheckpoint",
        "getOperation",
    ),
    *_of("operation_id", "operations/0/operation_id", "the newest operation", "listOperations", "getOperation"),
    *_of("operation_id", "resize_id", "the operation of the resize", "createResize", "getOperation"),
    *_of("resize_id", "resize_id", "the resize that was begun", "createResize", "getResize cancelResize"),
    *_of("resize_id", "resizes/0/resize_id", "the newest resize", "listResizes", "getResize cancelResize"),
    *_of("name", "series/0/name", "the first metric", "listMetricSeries", "queryMetric"),
    *[
        Follows("acquireTask", target, "the task", {"task_id": "$response.body#/task/task_id"}, _HELD)
        for target in ("reportTaskProgress", "completeTask", "failTask")
    ],
    *_of("task_id", "task/task_id", "the task", "acquireTask", "getTask skipTask"),
    Follows("getJob", "acquireTask", "a task of the job", {}, {"generation": "$response.body#/generation"}),
    Follows("getLog", "getLog", "newer lines", {"log": "$request.path.log", "after": "$response.body#/next_after"}),
    Follows("listEvents", "listEvents", "newer events", {"after": "$response.body#/next_after"}),
    Follows("listClusterEvents", "listClusterEvents", "newer events", {"after": "$response.body#/next_after"}),
]


def add_links(document: Json) -> None:
    """In place."""
    by_id = {
        operation["operationId"]: (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    }
    for follows in (*FOLLOWS, *_about_jobs(by_id), *_pages(by_id)):
        if follows.source in by_id and follows.target in by_id:
            _add(follows, by_id)


def _about_jobs(by_id: dict[str, tuple[str, Json]]) -> list[Follows]:
    """After a job was created or listed: all that asks for its name only. A created job may have no source: its script is a path then."""
    targets = [target for target, (path, _) in by_id.items() if OF_A_JOB.fullmatch(path)]
    return [
        follows
        for target in targets
        for follows in (
            *_of("job", "job", "the job that was created", "createJob", target),
            *_of("job", "jobs/0/job", "the first job", "listJobs", target),
        )
        if (follows.source, target) != ("createJob", "getJobSource")
    ]


def _pages(by_id: dict[str, tuple[str, Json]]) -> list[Follows]:
    return [
        Follows(source, source, "the next page", {"page_token": "$response.body#/next_page_token"})
        for source, (_, operation) in by_id.items()
        if any(each["name"] == "page_token" for each in operation.get("parameters", []))
    ]


def _add(follows: Follows, by_id: dict[str, tuple[str, Json]]) -> None:
    path, source = by_id[follows.source]
    target_path, _ = by_id[follows.target]
    [answer] = [answer for status, answer in source["responses"].items() if status.startswith("2")]
    parameters = dict(follows.parameters)
    if "{job}" in path and "{job}" in target_path:
        parameters.setdefault("job", "$request.path.job")
    link = {
        "operationId": follows.target,
        "description": f"Asks about {follows.about}.",
        "parameters": parameters,
    }
    if follows.body:
        link["requestBody"] = follows.body
    answer.setdefault("links", {})[follows.target] = link
