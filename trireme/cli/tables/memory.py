"""How much memory embedding tables will take: `trireme table plan` before there is a job, and what `trireme
run` says before it starts one."""

from __future__ import annotations

import json
from dataclasses import asdict

from trireme.cli import exit_codes
from trireme.launch.resume import Facts, tables_in
from trireme_shared.protocol.records import JobSpec, Mode, Strategy
from trireme_shared.protocol.records.job_choices import SNAPSHOT_BYTES
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.needs import needs_of

OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": RowOptimizer(kind="sgd", lr=0.05),
    "adagrad": RowOptimizer(kind="adagrad", lr=0.05),
    "adagrad-row": RowOptimizer(kind="adagrad", lr=0.05, per_row=True),
    "adam": RowOptimizer(kind="adam", lr=0.001),
    "ftrl": RowOptimizer(kind="ftrl", lr=0.05),
}
SHOWN = 8


def plan(
    rows: int, dim: int, optimizer: str, pservers: int, ids: int, lanes: int, *, limited: bool, as_json: bool
) -> int:
    """Returns the exit code. `limited`: the table has `max_rows`."""
    init = RowInit(kind="normal", scale=0.01)
    spec = TableSpec(
        name="t", dim=dim, optimizer=OPTIMIZERS[optimizer], init=init, max_rows=rows if limited else None
    )
    needs = needs_of(spec, -(-rows // pservers), -(-ids // pservers), lanes=lanes, snapshot=SNAPSHOT_BYTES)
    if as_json:
        print(json.dumps({**asdict(needs), "total": needs.total, "pservers": pservers}))  # noqa: T201
    else:
        where = "at the parameter server" if pservers == 1 else f"at each of {pservers} parameter servers"
        print(f"{where}: {needs.text()}")  # noqa: T201
    return exit_codes.OK


def memory_of_tables(model: Facts | None, spec: JobSpec, here: int) -> list[str]:
    """Lines for the user; none if no table has `max_rows`. `here`: bytes of memory that all parameter servers
    (collective: trainers) of the job, which are on this machine, share."""
    tables = [table for table in tables_in(model or {}).values() if table.max_rows is not None]
    if not tables:
        return []
    replicas = spec.strategy is Strategy.COLLECTIVE
    holders, parts = (spec.trainers, 1) if replicas else (spec.pservers, spec.pservers)
    lanes = spec.lanes if spec.mode is Mode.SYNC else 1
    needs = {
        table.name: needs_of(table, -(-(table.max_rows or 0) // parts), 0, spec.slot_count, lanes)
        for table in tables
    }
    lines = []
    for table in tables[:SHOWN]:
        needed = needs[table.name]
        size = needed.rows + needed.cells + needed.limits
        of_all, each = table.max_rows or 0, size / needed.count
        lines.append(
            f"table {table.name}: at most {of_all:,} rows of {each:,.0f} bytes, "
            f"{_gb(size * holders)}{_each(spec, size)}"
        )
    if len(tables) > SHOWN:
        lines.append(f"and {len(tables) - SHOWN} more tables")
    rows = sum(each.rows + each.cells + each.limits for each in needs.values())
    other = next(iter(needs.values())).other
    every_row = sum(each.rows + 16 * each.count for each in needs.values())
    kept = min(spec.snapshot_bytes, every_row) if spec.mode is Mode.SYNC else every_row
    least, most = holders * (rows + other), holders * (rows + other + kept)
    lines.append(
        f"full tables take {_gb(least)}, and up to {_gb(most)} while a checkpoint is written; this "
        f"machine has {_gb(here)}"
    )
    if least > here:
        lines.append(
            f"warning: full tables do not fit into this machine's memory (they need {_gb(least)}, "
            f"there are {_gb(here)}): {'trainers' if replicas else 'parameter servers'} will be "
            "killed when they "
            "have grown so far; lower max_rows or dim, take an optimizer with less state, or train "
            "on more machines (trireme up)"
        )
    elif most > here:
        lines.append(
            "warning: full tables may not fit into this machine's memory while a checkpoint is "
            f"written (they need {_gb(most)}, there are {_gb(here)})"
        )
    return lines


def _each(spec: JobSpec, size: int) -> str:
    if spec.strategy is Strategy.COLLECTIVE:
        return (
            f", {_gb(size)} at each of {spec.trainers} trainers: each has all rows"
            if spec.trainers > 1
            else ""
        )
    return f", {_gb(size)} at each of {spec.pservers} parameter servers" if spec.pservers > 1 else ""


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
