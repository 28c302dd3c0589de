"""The REST API as a Python client, for notebooks and programs: typed results, typed errors, lists that page
by themselves.

from trireme.client import Client

with Client("http://127.0.0.1:8470") as client:
    operation = client.create_checkpoint("digits")
    client.wait_for_operation("digits", operation.operation_id)
    for event in client.follow_events("digits"):
        print(event.event_time, event.message)
"""

from trireme.client.asynchronous import AsyncClient
from trireme.client.exchange import ONLY_JOB, EventGap
from trireme.client.synchronous import Client
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import (
    CallerError,
    Conflict,
    CursorExpired,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PeerError,
    PreconditionFailed,
    TriremeError,
    Unauthorized,
)
from trireme_shared.protocol.records.cluster import Scheduling, Source, Standing
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.operations import Strategy
from trireme_shared.protocol.rest_cluster import CreateJob, CreateSchedule

__all__ = [
    "ONLY_JOB",
    "AsyncClient",
    "CallerError",
    "Client",
    "Conflict",
    "CreateJob",
    "CreateSchedule",
    "CursorExpired",
    "DeadlineExceeded",
    "EventGap",
    "InvalidArgument",
    "JobSettings",
    "NotFound",
    "PeerError",
    "PreconditionFailed",
    "Scheduling",
    "Source",
    "Standing",
    "Strategy",
    "Tls",
    "TriremeError",
    "Unauthorized",
]
