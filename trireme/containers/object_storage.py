"""S3 for a cluster of containers: the keys of its own S3 server, and the bucket of its storage.

<root>/s3/credentials          as the AWS tools read it            who reads and writes the storage
<root>/s3-server/config.json   the same keys, as SeaweedFS reads   the S3 server alone
"""

from __future__ import annotations

import asyncio
import configparser
import json
from pathlib import Path

from trireme_shared.platform.runtime import clock, ids
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tokens import private_text, write_private
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import DeadlineExceeded, InvalidArgument, Unauthorized

FOLDER, CREDENTIALS = "s3", "credentials"
SERVER_FOLDER, SERVER_CONFIG = "s3-server", "config.json"
USER = "trireme"
SECTION, KEY_ID, KEY = "default", "aws_access_key_id", "aws_secret_access_key"
RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")
LOOK_S = 0.5


def prepare_keys(root: Path) -> None:
    """Make what is missing below `root`; the server's file always has the keys of the other one. Raises InvalidArgument."""
    credentials, config = root / FOLDER / CREDENTIALS, root / SERVER_FOLDER / SERVER_CONFIG
    for path in (credentials, config):
        try:
            private_files.make_missing(path.parent)
        except OSError as error:
            raise InvalidArgument(f"{path.parent} cannot be made: {error.strerror}") from error
    if not credentials.exists():
        write_private(credentials, f"[{SECTION}]\n{KEY_ID} = {USER}\n{KEY} = {ids.secret()}\n")
    key_id, key = _keys(credentials)
    identity = {"name": USER, "credentials": [{"accessKey": key_id, "secretKey": key}], "actions": RIGHTS}
    text = json.dumps({"identities": [identity]}, indent=1) + "\n"
    if not config.exists() or private_text(config) != text:
        write_private(config, text)


def _keys(path: Path) -> tuple[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    hint = f"write it as for the AWS tools: [{SECTION}], {KEY_ID} = ..., {KEY} = ..."
    try:
        parser.read_string(private_text(path))
    except configparser.Error:  # its message may show a key
        raise InvalidArgument(f"{path} is no file of credentials", hint=hint) from None
    found = tuple(parser.get(SECTION, name, fallback="").strip() for name in (KEY_ID, KEY))
    if not all(found):
        raise InvalidArgument(f"{path} has no {KEY_ID} and {KEY} below [{SECTION}]", hint=hint)
    return found[0], found[1]


async def prepare_bucket(url: str, limit_s: float) -> None:
    """Wait until `url` can be written and read. A missing bucket is made, but not at Amazon: the name may be mistyped there.

    Raises Unauthorized, InvalidArgument (there is no such bucket), DeadlineExceeded with the last reason.
    """
    deadline = clock.monotonic() + limit_s
    while True:
        try:
            await asyncio.to_thread(files.check_writable, url)
            return
        except object_store.NoBucket as error:
            if not object_store.endpoint():
                raise InvalidArgument(f"the storage cannot be used: {error}") from error
            reason: OSError = error
        except PermissionError as error:
            raise Unauthorized(f"the storage cannot be used: {error}") from error
        except OSError as error:  # it is on its way, or cannot write yet
            reason = error
        if clock.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {limit_s:g} s for the storage: {reason}") from reason
        if isinstance(reason, object_store.NoBucket):
            await asyncio.to_thread(object_store.make_bucket, url)
        else:
            await asyncio.sleep(LOOK_S)
