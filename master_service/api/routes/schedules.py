"""Jobs that begin again and again, at the times of a cron expression."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from master_service.api import render_cluster as render
from master_service.api.requests.conditional import ExpectedVersion, ReadingIf
from master_service.api.routes.dependencies import PageSize, PageToken, answered
from master_service.api.routes.jobs import ClusterOf, schedule_of
from master_service.api.routes.keyed import AnsweringInCluster
from trireme_shared.protocol.rest_cluster import CreateSchedule, SchedulePage, ScheduleView

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])


@router.post("", operation_id="createSchedule", status_code=201)
async def create_schedule(cluster: ClusterOf, asked: CreateSchedule, answering: AnsweringInCluster) -> ScheduleView:
    """Its jobs are called `<name>-<UTC time as yyyymmddhhmm>`. Of times that pass while no master lives the latest one runs."""
    found = schedule_of(asked, cluster.storage_url)
    return await answering.answer(ScheduleView, partial(cluster.create_schedule, found, asked.source), render.schedule)


@router.get("", operation_id="listSchedules")
async def list_schedules(cluster: ClusterOf, page_size: PageSize = 100, page_token: PageToken = "") -> SchedulePage:
    """In the order of their names."""
    return render.schedules(cluster.term, page_size, page_token)


@router.get("/{schedule}", operation_id="getSchedule", response_model=ScheduleView)
async def get_schedule(cluster: ClusterOf, reading: ReadingIf, schedule: str) -> Response:
    """One schedule, and when its next job is created."""
    view = render.schedule(cluster.state.schedule(schedule))
    return reading.answer(view, view.version)


@router.delete("/{schedule}", operation_id="deleteSchedule")
async def delete_schedule(cluster: ClusterOf, expected: ExpectedVersion, schedule: str) -> ScheduleView:
    """No more jobs are created; those that were created go on."""
    return render.schedule(await answered(cluster.delete_schedule(schedule, expected)))
