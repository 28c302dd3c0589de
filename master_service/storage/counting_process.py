"""`python -m master_service.storage.counting_process`: the process in which the user's own code counts
records for the leader (user_code.py). What that code prints goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from master_service.storage.job_storage import PartialCounts, count_records
from master_service.storage.user_code import Counted, CountRequest
from trireme_shared.datasets.user_modules import enter
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError

NICER = 5
KILLED_FIRST = 1000  # man 5 proc_pid_oom_score_adj


def main() -> int:
    """0: it has answered."""
    telemetry.configure(level="WARNING", service="counting")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the user's code prints must not be taken for our answers
    os.nice(NICER)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(KILLED_FIRST), encoding="ascii")
    request = CountRequest.model_validate_json(sys.stdin.readline())
    partial = PartialCounts(request.storage, request.dataset, request.sizes)

    def keep(*_: object) -> None:
        """The leader steps down. The user's code need not come to an end."""
        partial.keep(now=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, keep)

    def tell(told: Counted) -> None:
        out.write(told.to_bytes().decode() + "\n")

    try:
        enter(Path(request.folder))
        table = count_records(
            request.dataset,
            request.sizes,
            lambda files, _: tell(Counted(files=files)),
            partial,
            request.seed,
        )
    except TriremeError as error:
        system = str(error.__cause__) if _is_of_the_system(error.__cause__) else ""
        tell(Counted(error=error.to_map(), system=system))
        return 0
    partial.remove()
    tell(Counted(table=table.to_map(), digest=table.digest))
    return 0


def _is_of_the_system(cause: BaseException | None) -> bool:
    """Whether it may be different another time."""
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # noqa: BLE001  the user's code may raise anything
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads and exit handlers of the user's code must not hold it up
