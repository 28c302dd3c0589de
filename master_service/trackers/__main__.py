"""`python -m master_service.trackers`: the process that follows one job for its leader, so that no tracker
can harm a master.

It works only while its leader permits it, so two leaders never log at once; the end of standard input, or of
the leader, ends it. What trackers print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from master_service.trackers.assignment import Assignment, News, Permit
from master_service.trackers.follower import Follower, text_of
from master_service.trackers.made import make
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.platform.runtime.telemetry import hidden

LOOK_S = 2.0
HANG_S = 300.0  # a tracker whose call lasts longer is made anew, which takes a new process
ENDED, STUCK, ALONE = 0, 75, 76


class Leader:
    """What the leader says; its last word counts."""

    def __init__(self, told: IO[str]) -> None:
        self.permit = Permit(until=0.0)
        self.changed = threading.Event()
        self._told = told

    def listen(self) -> None:
        """Until the leader ends: then this process does, too."""
        for line in self._told:
            before = self.permit
            try:
                self.permit = Permit.model_validate_json(line)
            except ValueError:
                break
            if (before.until, before.result) == (0.0, None) or before.result != self.permit.result:
                self.changed.set()
        os._exit(ALONE)

    @property
    def permits(self) -> bool:
        return clock.monotonic() < self.permit.until


def main() -> int:
    telemetry.configure(level="WARNING", service="trackers")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what trackers print must not be taken for our answers

    def tell(news: News) -> None:
        out.write(json.dumps(news.model_dump()) + "\n")

    assignment = Assignment.model_validate_json(sys.stdin.readline())
    if "--check" in sys.argv:
        return _check(assignment, tell)
    leader = Leader(sys.stdin)
    threading.Thread(target=leader.listen, daemon=True).start()
    follower, away = None, Notices()
    while True:
        leader.changed.wait(LOOK_S)
        leader.changed.clear()
        tell(News(state="alive"))
        if not leader.permits:
            continue
        try:
            if follower is None:
                follower = Follower(assignment, tell, leader.changed.set)
            follower.look(leader.permit.result)
        except OSError as error:
            if away.due(clock.monotonic()):
                tell(News(state="late", cause=hidden(f"the job's storage cannot be read: {error}")))
            clock.sleep(LOOK_S)
            continue
        away.over()
        if follower.ended:
            out.flush()
            os._exit(ENDED)  # threads of libraries need not be waited for
        if follower.stuck_s > HANG_S:
            os._exit(STUCK)


def _check(assignment: Assignment, tell: Callable[[News], None]) -> int:
    """Whether users' own trackers can be made: of a launcher, which imports no code of users."""
    for wanted in assignment.trackers:
        try:
            make(wanted, Path(assignment.beside) if assignment.beside else None)
        except BaseException as error:  # noqa: BLE001  a user's code may raise anything
            tell(News(state="late", tracker=wanted.kind, cause=text_of(error)))
    return ENDED


if __name__ == "__main__":
    sys.exit(main())
