"""`python -m trainer_agent inspect SCRIPT`: prints one JSON object, which the launcher reads. No side
effects.

    {"config", "dataset", "evaluation_dataset", "model"}   |   {"error": {code, message, hint, details}}
    exit 0
        2: not usable as it is, 1: its code failed

With `backend` nccl also `nccl`: whether this host has it.

Of settings that are not possible `details` has the `problems` as sentences, and the names of those in the
script's `config`.

The check builds model, layout and optimizer, and runs the first minibatch forward and backward. Its records
are the first ones of the dataset, which nobody has counted yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from trainer_agent.data import Reader, Shard, default_collate, open_dataset
from trainer_agent.model.compute import BeforeStep, Records
from trainer_agent.own_loop.job_steps import UNCOUNTED, JobSteps, telling
from trainer_agent.script.user_module import UserModule, load
from trireme_shared.datasets.dataset_files import files_of
from trireme_shared.datasets.random_state import seeded
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import is_compressed
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, TriremeError, UserCodeError
from trireme_shared.protocol.evaluations import check_criteria
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.datasets import Dataset, JsonLines, TFRecord, WebDataset
from trireme_shared.protocol.records.metric_states import MetricState, Sum
from trireme_shared.protocol.records.queue import MAX_SUMS_BYTES

if TYPE_CHECKING:
    from trainer_agent.model.compute import LaneResult, Records
    from trainer_agent.model.torch_compute import TorchCompute  # loads torch

T = TypeVar("T")
USAGE, USER_CODE = 2, 1
COMPARED_FILES = 32
TOLD = 8  # parts of a batch
SMALLER = (
    "{script}: in a job with {lanes} lanes, loss and BatchNorm see minibatches of {size} records "
    "(global_batch_size / lanes); a loss over pairs within the whole batch needs lanes = 1"
)


def inspect_script(script: str, *, check: bool, settings: list[str]) -> int:
    """What the script prints goes to stderr."""
    sys.dont_write_bytecode = True
    telemetry.configure(level="ERROR", json=False)  # what the user should know is in the answer
    with contextlib.redirect_stdout(sys.stderr):
        code, answer = _answer(script, check, settings)
    sys.stdout.write(json.dumps(answer) + "\n")
    return code


def _answer(script: str, check: bool, settings: list[str]) -> tuple[int, dict[str, Any]]:
    try:
        return 0, _inspect(script, check, dict(_assignment(item) for item in settings))
    except TriremeError as error:
        return USER_CODE if isinstance(error, UserCodeError) else USAGE, {"error": error.to_map()}


def _inspect(script: str, check: bool, settings: dict[str, str]) -> dict[str, Any]:
    user = load(script)
    try:
        return _described(user, check, settings)
    finally:
        if user.loop is not None:
            user.loop.close()


def _described(user: UserModule, check: bool, settings: dict[str, str]) -> dict[str, Any]:
    seed = _seed(settings)
    with seeded(seed):  # a script with a loop of its own runs here, as it does in a trainer
        config = user.config
    wanted = {name: value for name, value in {**config, **settings}.items() if value != ""}  # "": the default
    seed = _seed(wanted)
    dataset = user.dataset(seed=seed)
    evaluation = user.dataset("evaluation_dataset", seed) if user.has("evaluation_dataset") else None
    config = user.config  # with the settings of a DataLoader
    wanted = {name: value for name, value in {**config, **settings}.items() if value != ""}
    told = user.taken_over(settings)
    found: dict[str, Any] = {
        "config": config,
        "dataset": dataset.model_dump(mode="json"),
        "evaluation_dataset": evaluation.model_dump(mode="json") if evaluation is not None else None,
    }
    if check:
        found |= _try(user, dataset, evaluation, wanted)
    if told:
        found["notice"] = "\n".join(filter(None, (*told, found.get("notice"))))
    if wanted.get("backend") == "nccl":
        # torch only when it is needed
        from trireme_shared.collective.group import nccl_is_there  # noqa: PLC0415

        found["nccl"] = nccl_is_there()
    return found


def _seed(settings: Mapping[str, Any]) -> int:
    """What is no number is refused with the other settings."""
    try:
        return int(settings.get("seed", JobSpec.model_fields["seed"].default))
    except (TypeError, ValueError):
        return 0


def _try(
    user: UserModule, dataset: Dataset, evaluation: Dataset | None, settings: dict[str, Any]
) -> dict[str, Any]:
    from trainer_agent.model.flat import groups_of, tensors_of  # noqa: PLC0415  torch only when it is needed
    from trainer_agent.model.optimizer import (  # noqa: PLC0415  torch only when it is needed
        rates_sentence,
        scheduler_facts,
    )
    from trainer_agent.model.torch_compute import TorchCompute  # noqa: PLC0415  torch only when it is needed
    from trainer_agent.script.twice import Twice  # noqa: PLC0415  torch only when it is needed

    spec = _spec(user, dataset, evaluation, settings)
    made_up = JobSteps(UNCOUNTED, spec.epochs, counted=False)
    asked: list[JobSteps] = []

    def steps() -> JobSteps:
        asked.append(made_up)
        return made_up

    with ThreadPoolExecutor(1, "compute") as executor, telling(steps):
        compute = executor.submit(TorchCompute, user, spec, executor).result()
        twice = Twice(user.path, spec, compute)
        if not user.has("collate") and user.loop is None:
            compare_files(dataset, spec.seed)
        size, named = spec.minibatch_size, not user.has("collate")
        minibatch = twice.records("dataset()", lambda: first_records(dataset, size, spec.seed, named=named))
        scheduler = scheduler_facts(compute.optimizer, compute.scheduler) | (
            {"counts_steps": True} if asked else {}
        )
        compute.begin_step(BeforeStep(step_and_epoch=(0, 0) if spec.mode is Mode.SYNC else None))
        with _doing("the first minibatch", user, minibatch):
            twice.minibatch(lambda: asyncio.run(_with_rows(compute, lambda: _gradient(compute, minibatch))))
        if evaluation is not None:
            held_out = first_records(evaluation, size, spec.seed, named=named)
            with _doing("the first minibatch of the evaluation", user, held_out):
                sums = asyncio.run(_with_rows(compute, lambda: compute.evaluate(held_out)))
                twice.notices += kept_values(user.path.name, sums, len(held_out))
                if user.has("evaluate") and not user.has("metrics"):
                    twice.notices += summed_means(user.path.name, sums)
                metrics = asyncio.run(compute.metrics(sums))
            check_criteria(spec, metrics)
    tensors = tensors_of(compute.model, groups_of(compute.optimizer), compute.plan.policies)
    if getattr(dataset, "loader", False) and size < spec.global_batch_size:
        twice.notices.append(SMALLER.format(script=user.path.name, lanes=spec.lanes, size=size))
    notice = "\n".join(filter(None, (compute.started.sentence, rates_sentence(spec), *twice.notices)))
    layout = compute.layout
    tables = [table.model_dump(mode="json") for table in layout.tables]
    model = {
        "tensors": tensors,
        "optimizer": layout.optimizer.model_dump(mode="json"),
        "scheduler": scheduler,
        "tables": tables,
    }
    return ({"notice": notice} if notice else {}) | {"model": model}


def kept_values(script: str, sums: Mapping[str, Sum], records: int) -> list[str]:
    """What the user should know of metrics that keep values of every record. `sums`: of so many records."""
    told = []
    for name, value in sums.items():
        if isinstance(value, MetricState) and value.tensors:
            texts = [text for held in value.tensors.values() for each in held.values() for text in each]
            size = max(sum(map(len, texts)) / records, 1)
            told.append(
                f"{script}: the metric {name} keeps values of every record, about {size:.0f} bytes each: an "
                f"evaluation of more than about {MAX_SUMS_BYTES / size:,.0f} records fails the job; the size "
                "of trireme.metrics.AUC, or of one with thresholds=, does not grow with them"
            )
    return told


def summed_means(script: str, sums: Mapping[str, Sum]) -> list[str]:
    """What the user should know of results that will be sums over minibatches. `sums`: of one minibatch; what
    counts something is a whole number."""
    found = [
        f"{name} = {value:.4g}"
        for name, value in sums.items()
        if isinstance(value, int | float) and not float(value).is_integer()
    ]
    if not found:
        return []
    told = (
        f"{script}: evaluate returns {', '.join(found)} for a minibatch, and without metrics(sums) the "
        "result is the sum over all minibatches; for a mean over records, return sums and the number of "
        "records from evaluate, and divide them in metrics(sums)"
    )
    return [told]


class NoBlocks:
    """A BlockSink: nothing is pushed."""

    def done(self, block: int) -> None:
        pass


async def _gradient(compute: TorchCompute, minibatch: Records) -> LaneResult:
    """Also what the script's `ids` says is checked."""
    await compute.prepare(0, minibatch)
    return await compute.gradient((0, 1), 0, 0, minibatch, NoBlocks())


async def _with_rows(compute: TorchCompute, work: Callable[[], Awaitable[T]]) -> T:
    """Embedding tables have their initial rows."""
    if tables := compute.layout.tables:
        from trainer_agent.tables.local import LocalTables  # noqa: PLC0415

        # numba only when it is needed
        from trireme_shared.tables.first_use import compile_loops  # noqa: PLC0415

        compile_loops()  # all of them: the members find them on disk
        compute.read_rows(LocalTables(tables, compute.layout.slot_count).rows)
    return await work()


@contextlib.contextmanager
def _doing(task: str, user: UserModule, records: Records) -> Iterator[None]:
    """An error of the script says what the batch was that it got."""
    try:
        yield
    except UserCodeError as error:
        batch = ""
        with contextlib.suppress(Exception):  # that was the error, or it cannot be told
            if not user.has("collate"):  # else the script has made it
                batch = f", where batch = {shape_of(default_collate(records))}"
        error.details["task"] = task + batch
        raise


def shape_of(value: Any, depth: int = 3) -> str:
    """What a batch consists of, in a line: `{'x': float32 (32, 2), 'y': int64 (32,)}`."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    inner = depth - 1
    more = ", ..." if isinstance(value, Mapping | list | tuple) and len(value) > TOLD else ""
    if isinstance(value, Mapping) and depth:
        parts = (f"{name!r}: {shape_of(each, inner)}" for name, each in islice(value.items(), TOLD))
        return f"{{{', '.join(parts)}{more}}}"
    if isinstance(value, list | tuple) and depth:
        return f"({', '.join(shape_of(each, inner) for each in value[:TOLD])}{more})"
    return type(value).__name__


def _spec(
    user: UserModule, dataset: Dataset, evaluation: Dataset | None, settings: dict[str, Any]
) -> JobSpec:
    known = {name: value for name, value in settings.items() if name in JobSpec.model_fields}
    fixed = {
        "job": "inspect",
        "script": str(user.path),
        "storage": "-",
        "dataset": dataset,
        "evaluation_dataset": evaluation,
    }
    try:
        return JobSpec.model_validate({**known, **fixed})
    except ValidationError as error:
        problems = [_sentence(problem) for problem in error.errors()]
        msg = f"these settings are not possible together: {'; '.join(problems)}"
        raise InvalidArgument(msg, problems=problems, config=sorted(user.config)) from error


def _sentence(problem: Mapping[str, Any]) -> str:
    where = ".".join(map(str, problem["loc"]))
    return f"{where}: {problem['msg']}" if where else str(problem["msg"]).removeprefix("Value error, ")


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--set {text}", hint="write --set name=value")
    return name.strip().replace("-", "_"), value.strip()


def first_records(dataset: Dataset, count: int, seed: int = 0, *, named: bool = True) -> Records:
    """At most `count` records from the start of the first file that has any. `seed`: of the job. `named`: see
    open_dataset. Raises DatasetError."""
    reader = open_dataset(dataset, seed, named=named)
    problem: DatasetError | None = None
    for file in files_of(dataset):
        try:
            shard = _start_of(reader, file, count)
        except DatasetError as error:
            if error.details.get("records") != 0 and (dataset.names_code or not files.is_empty(file)):
                problem = problem or error
            continue
        return shard.minibatch(np.arange(len(shard), dtype=np.int64))
    raise problem or DatasetError(
        f"{', '.join(dataset.urls)} has no records", hint="check the path that dataset() returns"
    )


def compare_files(dataset: Dataset, seed: int = 0) -> None:
    """Formats without a schema, for a script without `collate`: the first record of each file has the columns
    and types of the dataset. Up to COMPARED_FILES files, spread over all; compressed ones would have to be
    decompressed whole. Raises DatasetError, with file and column."""
    if not isinstance(dataset, JsonLines | TFRecord | WebDataset):
        return
    reader = open_dataset(dataset, seed)
    found = [file for file in files_of(dataset) if not is_compressed(file)]
    for file in found[:: -(-len(found) // COMPARED_FILES) or 1]:
        if not files.is_empty(file):
            default_collate(reader.read(file, 0, 1).minibatch(np.arange(1, dtype=np.int64)))


def _start_of(reader: Reader, file: str, count: int) -> Shard:
    """`count` records, or half as many each time until the file has that many."""
    while True:
        try:
            return reader.read(file, 0, count)
        except DatasetError:
            if count == 1:
                raise
            count //= 2
