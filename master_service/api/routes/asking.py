"""What every request for an operation brings, and how it is answered: 202, with the place of its progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from master_service.api.problems import RETRY_AFTER_S
from master_service.api.routes.dependencies import MasterOf, WaitS, answered, asked_by, committed
from master_service.api.routes.keyed import Key, keyed_request
from master_service.core.decisions.requests import AnsweredBefore, Keyed, Once
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.operations import Operation


@dataclass(frozen=True)
class AskingFor:
    """`by`: for people, who asks."""

    master: Master
    response: Response
    key: str
    keyed: Keyed | None
    by: str
    wait_s: float

    async def begin(
        self, call: Callable[[Once[Operation] | None], Awaitable[Operation]], place: str = "operations"
    ) -> Operation:
        """The operation as it is then. If it was asked for before and has been forgotten since: as it was at first."""
        try:
            begun = await answered(call(Once(self.keyed, lambda begun: begun) if self.keyed else None))
        except AnsweredBefore as before:
            begun = Operation.model_validate_json(before.kept.answer)
        self.response.headers["Location"] = f"/v1/jobs/{self.master.keys.job}/{place}/{begun.operation_id}"
        operations = self.master.term.operations
        try:
            await operations.wait(begun.operation_id, self.wait_s)
        except NotFound:
            return begun
        found = await committed(self.master, lambda: operations.get(begun.operation_id))
        if found.running:
            self.response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return found


async def _asking(
    master: MasterOf, request: Request, response: Response, idempotency_key: Key = "", wait_s: WaitS = 0.0
) -> AskingFor:
    keyed = await keyed_request(request, idempotency_key, job=master.keys.job)
    return AskingFor(master, response, idempotency_key, keyed, asked_by(request), wait_s)


Asking = Annotated[AskingFor, Depends(_asking)]
