"""Registered members, and reports about suspected or failed ones."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from master_service.api import render
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, committed
from master_service.api.routes.keyed import AnsweringInJob, empty
from trireme_shared.protocol.records import UserFailure
from trireme_shared.protocol.rest import Empty, MemberPage, MemberView, SuspectAnswer

router = APIRouter(prefix="/members", tags=["members"])


@router.get("", operation_id="listMembers")
async def list_members(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> MemberPage:
    """Parameter servers, then trainers, that hold a lease now."""
    return await committed(master, lambda: render.members(master.job, page_size, page_token))


@router.get("/{member_id}", operation_id="getMember")
async def get_member(master: MasterOf, member_id: str) -> MemberView:
    """One member, and what it works on."""
    return await committed(master, lambda: render.member_view(master.job, master.find_members(member_id)[0]))


@router.post("/{member_id}/suspect", operation_id="reportSuspect")
async def report_suspect(master: MasterOf, answering: AnsweringInJob, member_id: str) -> SuspectAnswer:
    """The master probes the member and revokes its lease if nothing listens there."""
    call = partial(master.report_suspect, member_id)
    return await answering.answer(SuspectAnswer, call, lambda dead: SuspectAnswer(dead=dead))


@router.post("/{member_id}/failures", operation_id="reportFailure")
async def report_failure(master: MasterOf, answering: AnsweringInJob, member_id: str, failure: UserFailure) -> Empty:
    """The user's code failed outside a task."""
    return await answering.answer(Empty, partial(master.report_failure, member_id, failure), empty)
