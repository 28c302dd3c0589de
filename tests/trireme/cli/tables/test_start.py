"""What a run says of the memory of its tables before it starts."""

from __future__ import annotations

from trireme.cli.tables.memory import memory_of_tables
from trireme_shared.protocol.records import JobSpec, Strategy
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.needs import needs_of

SPEC = JobSpec(job="ctr", script="/s.py", dataset=TextLines("t.txt"), storage="/data", pservers=2)
ADAM, ZERO = RowOptimizer(kind="adam", lr=0.1), RowInit(kind="constant", scale=0)


def facts(**tables: int | None) -> dict[str, object]:
    specs = [
        TableSpec(name=name, dim=16, optimizer=ADAM, init=ZERO, max_rows=rows)
        for name, rows in tables.items()
    ]
    return {"tables": [spec.model_dump(mode="json") for spec in specs]}


def test_tables_with_a_limit_are_told_with_their_bytes_as_the_plan_has_them():
    lines = memory_of_tables(facts(user=3_000_000, item=20_000, free=None), SPEC, 64 << 30)
    assert lines == [
        "table user: at most 3,000,000 rows of 233 bytes, 0.70 GB, 0.35 GB at each of 2 parameter servers",
        "table item: at most 20,000 rows of 233 bytes, 4.66 MB, 2.33 MB at each of 2 parameter servers",
        (
            "full tables take 0.84 GB, and up to 1.47 GB while a checkpoint is written; this machine has "
            "68.72 GB"
        ),
    ]
    spec = TableSpec(name="user", dim=16, optimizer=ADAM, init=ZERO, max_rows=3_000_000)
    assert f"{2 * needs_of(spec, 1_500_000, 0).total / 1e9:.2f} GB" == "0.83 GB"


def test_each_trainer_of_a_collective_job_has_all_rows():
    model = facts(user=3_000_000)
    spec = SPEC.model_copy(update={"strategy": Strategy.COLLECTIVE, "pservers": 0, "trainers": 4})
    assert memory_of_tables(model, spec, 4 << 30) == [
        (
            "table user: at most 3,000,000 rows of 232 bytes, 2.78 GB, 0.69 GB at each of 4 trainers: "
            "each has all rows"
        ),
        "full tables take 3.05 GB, and up to 5.54 GB while a checkpoint is written; this machine has 4.29 GB",
        (
            "warning: full tables may not fit into this machine's memory while a checkpoint is written "
            "(they need 5.54 GB, there are 4.29 GB)"
        ),
    ]
    assert "trainers will be killed" in memory_of_tables(model, spec, 1 << 30)[-1]


def test_what_does_not_fit_is_warned_of():
    model = facts(user=3_000_000)
    assert memory_of_tables(model, SPEC, 800_000_000)[-1].startswith(
        "warning: full tables do not fit into this machine's memory (they need 0.83 GB, there are 0.80 GB)"
    )
    assert (
        "may not fit into this machine's memory while a checkpoint is written"
        in memory_of_tables(model, SPEC, 1 << 30)[-1]
    )
    assert not any("warning" in line for line in memory_of_tables(model, SPEC, 2 << 30))


def test_nothing_is_told_of_models_without_limits():
    assert memory_of_tables(facts(user=None), SPEC, 1) == memory_of_tables(None, SPEC, 1) == []
    assert memory_of_tables({"tensors": []}, SPEC, 1) == []
