#!/usr/bin/env python3
"""Exit code 0 if the service in this container answers /healthz."""

import os
import sys
import urllib.request

try:
    with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['TRIREME_PORT']}/healthz", timeout=3) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(str(error))
