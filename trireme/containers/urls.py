"""`python -m trireme.containers.urls cat|ls URL`: as cat and ls, for files of a storage that is no folder."""

from __future__ import annotations

import argparse
import shutil
import sys

from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import TriremeError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trireme.containers.urls", description=__doc__)
    parser.add_argument("command", choices=("cat", "ls"))
    parser.add_argument("url", help="such as s3://trireme/jobs/digits/export/model.safetensors")
    arguments = parser.parse_args()
    try:
        if arguments.command == "cat":
            with files.open_read(arguments.url) as file:
                shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()
        else:
            for name in files.names(arguments.url):
                sys.stdout.write(f"{name}\n")
    except FileNotFoundError as error:
        sys.stderr.write(f"error: {arguments.url} does not exist: {error}\n")
        return 1
    except (OSError, TriremeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
