"""The rooms of the master stand on floors: each imports only from its own and from those below it."""

from __future__ import annotations

from tests.tidy.sources import ROOT, imports, where

FLOORS = [
    {"core.changes"},
    {"core.queue"},
    {"core.state"},
    {"core.decisions"},
    {"store", "storage"},
    {"control"},
    {"leadership"},
    {"masterless", "api"},
]


def floor_of(module: str) -> int | None:
    """None for what is above all floors: `__main__` and its settings."""
    return next((k for k, rooms in enumerate(FLOORS) for room in rooms if f"{module}.".startswith(f"{room}.")), None)


def test_no_room_imports_from_a_higher_floor() -> None:
    wrong, package = [], ROOT / "master_service"
    for path in sorted(package.rglob("*.py")):
        own = floor_of(".".join(path.relative_to(package).with_suffix("").parts))
        for module, line in imports(path):
            theirs = floor_of(module.removeprefix("master_service.")) if module.startswith("master_service.") else None
            if own is not None and theirs is not None and theirs > own:
                wrong.append(f"{where(path, line)} imports {module}")
    assert not wrong, "\n".join(wrong)
