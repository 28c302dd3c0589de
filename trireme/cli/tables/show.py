"""`trireme table stats | get | top`: rows out of the newest checkpoint of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trireme.cli import exit_codes
from trireme.cli.checkpoint import Answer, answer, choose, spec_of
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.tables import read_rows
from trireme_shared.protocol.errors import InvalidArgument, NotFound
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import TableSpec

if TYPE_CHECKING:
    from trireme_shared.tables.table import RowsOfIds  # loads numba

SHOWN = 8  # values of a row, to people


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest checkpoint of a job with embedding tables."""

    job: str
    storage: str
    ref: CheckpointRef
    manifest: Manifest

    @classmethod
    def of(cls, job: str | None, data_dir: Path | None, url: str | None) -> _Newest:
        """Raises NotFound, CheckpointUnusable."""
        spec = spec_of(job, data_dir, url)
        ref = choose(spec, None)
        manifest = stored.read_manifest(spec.storage, spec.job, ref)
        if not manifest.layout.tables:
            raise NotFound(f"job {spec.job} has no embedding tables")
        return cls(spec.job, spec.storage, ref, manifest)

    def table(self, name: str) -> TableSpec:
        """Raises NotFound."""
        for spec in self.manifest.layout.tables:
            if spec.name == name:
                return spec
        names = ", ".join(spec.name for spec in self.manifest.layout.tables)
        raise NotFound(f"job {self.job} has no table {name[:80]!r}; there are: {names}")

    @property
    def version(self) -> int:
        """Of the tables; asynchronous: the highest of all parameter servers."""
        return max(
            self.manifest.step if part.rows_version is None else part.rows_version
            for part in self.manifest.parts
        )

    def read(self, spec: TableSpec, take: Callable[[RowsOfIds], None]) -> int:
        return read_rows(self.storage, self.ref, self.manifest, spec, take)

    def document(self, **fields: Any) -> dict[str, Any]:
        return {"job": self.job, "checkpoint": self.ref.uuid, "step": self.ref.step, **fields}

    def show(self, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
        console = Console(soft_wrap=True)
        console.print(
            f"of checkpoint {self.ref.uuid[:8]}, step {self.ref.step}, the newest one", highlight=False
        )
        shown = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            shown.add_row(*(_cell(column, row[column]) for column in columns))
        console.print(shown)


def stats(job: str | None, data_dir: Path | None, url: str | None = None, *, as_json: bool) -> int:
    """Returns the exit code."""

    def work() -> Answer:
        newest = _Newest.of(job, data_dir, url)
        rows = [_stats(newest, spec) for spec in newest.manifest.layout.tables]
        if not as_json:
            newest.show(
                ("table", "dim", "optimizer", "rows", "bytes", "updates", "trained_last", "trained_first"),
                rows,
            )
        return newest.document(tables=rows), exit_codes.OK

    return answer(work, as_json=as_json)


def _stats(newest: _Newest, spec: TableSpec) -> dict[str, Any]:
    """`trained_first`, `trained_last`: steps, the least and the greatest of those in which each row was
    trained last."""
    from trireme_shared.tables.memory import stamps_of  # noqa: PLC0415  loads numba

    count, steps = 0, []

    def take(rows: RowsOfIds) -> None:
        nonlocal count
        count += len(rows)
        if len(rows):
            stamps = stamps_of(rows.words, newest.version)
            steps.extend([int(stamps.min()), int(stamps.max())])

    updates = newest.read(spec, take)
    facts = {"table": spec.name, "dim": spec.dim, "optimizer": spec.optimizer.kind, "rows": count}
    facts |= {"bytes": count * (16 + 4 * spec.row_words), "updates": updates, "max_rows": spec.max_rows}
    return facts | {"trained_first": min(steps, default=None), "trained_last": max(steps, default=None)}


def get(
    job: str | None, data_dir: Path | None, url: str | None, name: str, given: Sequence[str], *, as_json: bool
) -> int:
    """Returns the exit code."""

    def work() -> Answer:
        import numpy as np  # noqa: PLC0415

        from trireme_shared.tables.table import initial_values  # noqa: PLC0415  loads numba

        wanted = [_id_of(text) for text in given]
        newest = _Newest.of(job, data_dir, url)
        spec = newest.table(name)
        found: dict[int, dict[str, Any]] = {}

        def take(rows: RowsOfIds) -> None:
            chosen = rows.where(np.isin(rows.ids, wanted))
            found.update((row["id"], row) for row in _described(chosen, spec, newest.version))

        newest.read(spec, take)
        starts = initial_values(spec, np.array(wanted, np.int64))
        rows = [
            found.get(
                one, {"id": one, "row": False, "step": None, "minibatches": 0, "values": start.tolist()}
            )
            for one, start in zip(wanted, starts, strict=True)
        ]
        if not as_json:
            newest.show(("id", "row", "step", "minibatches", "values"), rows)
        return newest.document(table=name, rows=rows), exit_codes.OK

    return answer(work, as_json=as_json)


def top(
    job: str | None, data_dir: Path | None, url: str | None, name: str, by: str, count: int, *, as_json: bool
) -> int:
    """Returns the exit code."""

    def work() -> Answer:
        from trireme_shared.tables.table import joined  # noqa: PLC0415  loads numba

        newest = _Newest.of(job, data_dir, url)
        spec = newest.table(name)
        best: list[RowsOfIds] = []

        def take(rows: RowsOfIds) -> None:
            best[:] = [_first(joined([*best, rows], spec.row_words), spec, newest.version, by, count)]

        newest.read(spec, take)
        rows = _described(best[0], spec, newest.version) if best else []
        rows.sort(key=lambda row: (-_measure(row, by), row["id"]))
        if not as_json:
            newest.show(("id", "step", "minibatches", "values"), rows)
        return newest.document(table=name, by=by, rows=rows), exit_codes.OK

    return answer(work, as_json=as_json)


def _first(rows: RowsOfIds, spec: TableSpec, version: int, by: str, count: int) -> RowsOfIds:
    """Those that come first; ids ascend."""
    import numpy as np  # noqa: PLC0415

    from trireme_shared.tables.memory import frequencies_of, stamps_of  # noqa: PLC0415  loads numba

    if len(rows) <= count:
        return rows
    match by:
        case "frequency":
            keys = frequencies_of(rows.words)
        case "step":
            keys = stamps_of(rows.words, version)
        case _:
            keys = np.square(rows.content[:, : spec.dim], dtype=np.float64).sum(1)
    return rows.where(np.sort(np.argsort(-keys, kind="stable")[:count]))


def _measure(row: dict[str, Any], by: str) -> float:
    if by == "norm":
        return float(sum(value * value for value in row["values"]))
    return float(row["minibatches" if by == "frequency" else "step"])


def _described(rows: RowsOfIds, spec: TableSpec, version: int) -> list[dict[str, Any]]:
    """`step`: in which it was trained last. `minibatches`: about so many had the id."""
    from trireme_shared.tables.memory import frequencies_of, stamps_of  # noqa: PLC0415  loads numba

    counts = (1 << frequencies_of(rows.words)) - 1
    stamps = stamps_of(rows.words, version)
    facts = zip(rows.ids.tolist(), stamps.tolist(), counts.tolist(), rows.content, strict=True)
    return [
        {"id": one, "row": True, "step": step, "minibatches": count, "values": content[: spec.dim].tolist()}
        for one, step, count, content in facts
    ]


def _id_of(text: str) -> int:
    """Raises InvalidArgument."""
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        msg = f"{text[:80]!r} is no id: ids are whole numbers in [-2**63, 2**63)"
        raise InvalidArgument(msg, hint="of a text, `trireme.nn.ids_of` gives the id")
    return number


def _cell(column: str, value: Any) -> str:
    if column in ("id", "row"):
        return str(value) if column == "id" else "yes" if value else "initial"
    if isinstance(value, list):
        return " ".join(f"{number:.4g}" for number in value[:SHOWN]) + (" ..." if len(value) > SHOWN else "")
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
