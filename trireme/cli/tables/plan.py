"""`trireme table plan`: the memory that a table will take, before there is a job."""

from __future__ import annotations

import json
from dataclasses import asdict

from trireme.cli import exit_codes
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


def plan(
    rows: int, dim: int, optimizer: str, pservers: int, ids: int, lanes: int, *, limited: bool, as_json: bool
) -> int:
    """Returns the exit code. `limited`: the table has `max_rows`."""
    init = RowInit(kind="normal", scale=0.01)
    spec = TableSpec(name="t", dim=dim, optimizer=OPTIMIZERS[optimizer], init=init, max_rows=rows if limited else None)
    needs = needs_of(spec, -(-rows // pservers), -(-ids // pservers), lanes=lanes, snapshot=SNAPSHOT_BYTES)
    if as_json:
        print(json.dumps({**asdict(needs), "total": needs.total, "pservers": pservers}))  # noqa: T201
    else:
        where = "at the parameter server" if pservers == 1 else f"at each of {pservers} parameter servers"
        print(f"{where}: {needs.text()}")  # noqa: T201
    return exit_codes.OK
