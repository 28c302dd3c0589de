"""What every request for an operation brings, and how it is answered: 202, with the place of its progress."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from master_service.api.routes.dependencies import MasterOf, WaitS, answered, committed
from master_service.leadership.master import Master
from shared.records.operations import Operation

Key = Annotated[str, Header(alias="Idempotency-Key", max_length=200, description="the same key is the same operation")]


@dataclass(frozen=True)
class AskingFor:
    """`by`: for people, who asks."""

    master: Master
    response: Response
    key: str
    by: str
    wait_s: float

    async def begin(self, call: Awaitable[Operation], place: str = "operations") -> Operation:
        begun = await answered(call)
        self.response.headers["Location"] = f"/v1/jobs/{self.master.keys.job}/{place}/{begun.operation_id}"
        operations = self.master.term.operations
        await operations.wait(begun.operation_id, self.wait_s)
        return await committed(self.master, lambda: operations.get(begun.operation_id))


async def _asking(
    master: MasterOf, request: Request, response: Response, idempotency_key: Key = "", wait_s: WaitS = 0.0
) -> AskingFor:
    by = f"asked by {request.client.host if request.client else 'REST'}"
    return AskingFor(master, response, idempotency_key, by, wait_s)


Asking = Annotated[AskingFor, Depends(_asking)]
