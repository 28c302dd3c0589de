"""A worker's end of two pipes of JSON lines: [name, arguments] on stdin, {"answer": ...} or {"error": ...} on
the descriptor that REPLIES names: what other systems print goes elsewhere. Needs nothing but Python: it runs
in their virtual environments."""

import json
import os
import sys
import traceback

REPLIES = "REPLIES_DESCRIPTOR"


def serve(served):
    """Calls `served[name](*arguments)` until stdin ends."""
    with os.fdopen(int(os.environ[REPLIES]), "w", buffering=1) as out:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                reply = {"answer": served[name](*arguments)}
            except Exception as error:  # noqa: BLE001  whoever asked hears of it
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(reply) + "\n")
