"""The rooms of a package stand on floors: each imports only from its own and from those below it."""

from __future__ import annotations

import pytest

from tests.tidy.sources import folder_of, imports, where

FLOORS = {
    "master_service": [
        {"core.changes", "core.placement", "dashboard"},
        {"core.queue"},
        {"core.state"},
        {"core.decisions"},
        {"core.explanation"},
        {"store", "storage"},
        {"trackers"},
        {"control"},
        {"leadership"},
        {"cluster"},
        {"masterless", "api"},
    ],
    "trainer_agent": [
        {"core", "data", "waiting", "own_loop", "start_values", "tables"},
        {"model", "data_plane"},
        {"script"},
        {"reading"},
        {"tasks", "membership", "collective"},
        {"loops"},
        {"agent", "process"},
    ],
    "pserver_service": [
        {"context", "handoff_client"},
        {"checkpoints", "start_rows"},
        {"handoff"},
        {"recovery"},
        {"member"},
    ],
    "trireme_shared": [
        {"protocol"},
        {"blocks", "platform.runtime"},
        {"platform.etcd", "platform.storage", "platform.security"},
        {"platform.membership", "tables", "datasets"},
        {"checkpoints", "collective"},
        {"serving.core", "serving.optimizers", "serving.transport"},
        {
            "serving.ports",
            "serving.block_server",
            "serving.pserver",
            "serving.table_loader",
        },
        {"serving.data_plane"},
    ],
    "trireme": [
        {"validation", "data", "nn", "communicator"},
        {"config"},
        {"settings", "client"},
        {"view"},
        {"launch"},
        {"launchers"},
        {"pool", "preflight", "existing_etcd", "containers"},
        {"plain", "loop", "script_trial"},
        {"cli"},
        {"background"},
    ],
}


def floor_of(package: str, module: str) -> int | None:
    """None for what is above all floors: `__main__` and its settings."""
    return next(
        (
            k
            for k, rooms in enumerate(FLOORS[package])
            for room in rooms
            if f"{module}.".startswith(f"{room}.")
        ),
        None,
    )


@pytest.mark.parametrize("package", FLOORS)
def test_no_room_imports_from_a_higher_floor(package: str) -> None:
    wrong = []
    for path in sorted(folder_of(package).rglob("*.py")):
        own = floor_of(package, ".".join(path.relative_to(folder_of(package)).with_suffix("").parts))
        for module, line in imports(path):
            theirs = (
                floor_of(package, module.removeprefix(f"{package}."))
                if module.startswith(f"{package}.")
                else None
            )
            if own is not None and theirs is not None and theirs > own:
                wrong.append(f"{where(path, line)} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", FLOORS)
def test_every_folder_stands_on_a_floor(package: str) -> None:
    """So does every module of trireme_shared. Modules beside the folders of the others start processes: they
    may import all."""
    folder = folder_of(package)
    modules = [
        ".".join(path.relative_to(folder).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))
    ]
    lost = [name for name in modules if not name.endswith("__init__") and floor_of(package, name) is None]
    assert not [name for name in lost if "." in name or package == "trireme_shared"], lost
