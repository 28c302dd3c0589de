"""Where a script is trained, in this process: by `python script.py`, by jobs of both strategies and by
asynchronous ones, as functions and as a loop.

Each gives an Outcome: the trained state_dict, or why it was refused.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import io
import linecache
import runpy
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import structlog
import torch
from torch.optim import optimizer
from torch.utils.data import default_collate

from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.core.queue.streams import EpochOrder
from master_service.storage.job_storage import count_records
from tests.script_fuzz.script import RECORDS, Script
from tests.trainer_agent import cluster as with_pservers
from tests.trainer_agent.collective import cluster as collective
from trainer_agent.data import evaluation_seed, minibatches_in
from trainer_agent.script.user_module import load
from trireme.plain import epoch_minibatches, plain_spec, run
from trireme_shared.datasets.random_state import seed_everything
from trireme_shared.protocol.errors import TriremeError, UserCodeError
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle, Npy

LIMIT_S = 30.0
THREADS = 2  # of torch in a process of a machine with two cores, until somebody sets another number
State = Mapping[str, torch.Tensor]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """`state`: trained; else `refused` says why, and `crashed` is the traceback of what nobody meant to
    raise. `told`: warnings."""

    state: State | None = None
    metrics: Metrics = field(default_factory=dict)
    refused: str = ""
    crashed: str = ""
    told: tuple[str, ...] = field(default=())


def reference(script: Script, *, asynchronous: bool = False) -> tuple[State, Metrics]:
    """By plain PyTorch, with the random numbers of a synchronous or an asynchronous job: what it has after
    training, and what its metrics say of that. Raises what the script raises."""
    module: dict[str, Any] = {"__name__": "plain"}
    with _own_warnings(), _nothing_left():
        torch.set_num_threads(1)
        exec(compile(script.plain(), "plain.py", "exec"), module)
        model = module["train"](_epochs(script, module, asynchronous=asynchronous))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return state, _evaluated(script, module, model) if script.is_evaluated else {}


def _epochs(script: Script, module: Mapping[str, Any], *, asynchronous: bool) -> Iterator[Iterator[Any]]:
    """The batches of each. Seeded before each batch, as a lane is, or a minibatch of a task."""
    spec = spec_of(script, script.folder / "script.py", "ps", dataset=Npy(script.numbers))
    table, steps = count_records(spec.dataset, TaskSizes.of(spec), seed=spec.seed), count()
    collate = module[script.collator] if script.collator else default_collate
    rows = module["rows"]()

    def batches(epoch: int) -> Iterator[Any]:
        seeds = _seeds_of_tasks(spec, table, epoch)
        for minibatch in epoch_minibatches(spec, table, epoch):
            of_task, step = next(seeds), next(steps)
            seed_everything(of_task if asynchronous else step_seed(spec.seed, step, 0))
            yield collate([rows[script.item(epoch, int(record["numbers"]))] for record in minibatch])

    return map(batches, range(spec.epochs))


def _evaluated(script: Script, module: Mapping[str, Any], model: torch.nn.Module) -> Metrics:
    """By objects that see all records in their order. Each minibatch finds the buffers of the version."""
    spec = spec_of(script, script.folder / "script.py", "ps")
    objects, rows = module["evaluation_metrics"](), module["rows"]()
    table = count_records(spec.dataset, TaskSizes.evaluated(spec), seed=spec.seed)
    buffers = [buffer.clone() for buffer in model.buffers()]
    collate = module.get("collate", default_collate)  # of the script; a DataLoader's is for what it loads
    for task in range(table.tasks):
        place = table.locate(task)
        for number in range(minibatches_in(place.count, spec.minibatch_size)):
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            seed_everything(evaluation_seed(spec.seed, task, number))
            first = place.first + number * spec.minibatch_size
            last = min(first + spec.minibatch_size, place.first + place.count)
            with torch.no_grad():
                module["evaluate"](model.eval(), collate(rows[first:last]), objects)
    found = {name: torch.as_tensor(each.compute()).reshape(-1).tolist() for name, each in objects.items()}
    return {
        name if len(values) == 1 else f"{name}.{number}": value
        for name, values in found.items()
        for number, value in enumerate(values)
    }


def _seeds_of_tasks(spec: JobSpec, table: FileTable, epoch: int) -> Iterator[int]:
    """Of the minibatches of an asynchronous epoch."""
    order = EpochOrder(table.tasks, spec.seed, epoch, spec.shuffle)
    for task in map(order.task_at, range(table.tasks)):
        for number in range(minibatches_in(table.locate(task).count, spec.minibatch_size)):
            yield step_seed(step_seed(spec.seed, epoch, task), number, 0)


def spec_of(script: Script, path: Path, storage: str, **more: Any) -> JobSpec:
    given = Npy(script.x, script.y, aligned=True)
    evaluation = {"evaluation_dataset": given} if script.is_evaluated else {}
    return JobSpec(
        job="fuzz",
        script=str(path),
        **{"dataset": given} | evaluation | script.settings | {"pservers": 1} | more,
        storage=str(script.folder / storage),
        task_timeout_floor_s=20,
    )


def plain_functions(script: Script) -> Outcome:
    """`python script.py`."""

    def train() -> Outcome:
        user, said = load(script.functions("fuzz_plain")), list[str]()
        result = run(user, plain_spec(user, {}), said.append)
        return Outcome(dict(result.model.state_dict()), result.metrics, told=tuple(said))

    return _outcome(train)


def plain_loop(script: Script) -> Outcome:
    """`python loop.py`."""

    def train() -> Outcome:
        path, said, printed = script.loop("fuzz_plain_loop"), io.StringIO(), io.StringIO()
        with (
            patch.object(sys.modules["__main__"], "__file__", str(path), create=True),
            patch.object(atexit, "register"),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(printed),
        ):
            contextvars.copy_context().run(runpy.run_path, str(path), run_name="__main__")
        lines = (line.rsplit(" ", 1) for line in printed.getvalue().splitlines())
        metrics = {name: float(value) for name, value in lines}
        return Outcome(torch.load(script.saved, weights_only=False), metrics, told=(said.getvalue(),))

    return _outcome(train)


def job(script: Script, kind: str, *, loop: bool) -> Outcome:
    name = f"fuzz_{'loop' if loop else 'functions'}_{kind}"
    path = script.loop(name) if loop else script.functions(name)
    kind_of_data = IterableStyle if any(each.streams for each in script.mutations) else MapStyle
    given = kind_of_data(f"{name}:dataset", records=RECORDS, loader=True)
    dataset = {"dataset": given} if script.has_loader else {}
    spec = spec_of(script, path, name, **JOBS[kind], **dataset)
    return _outcome(
        lambda: asyncio.run(_trained(spec, collective if kind == "collective" else with_pservers))
    )


async def _trained(spec: JobSpec, strategy: Any) -> Outcome:
    async with strategy.cluster(spec) as made:
        made.add_trainer("trainer-0-x")
        before_the_run = made.computes["trainer-0-x"].minibatch.modes.notice  # by the check of `trireme run`
        ended, left = asyncio.ensure_future(made.ended(LIMIT_S)), made.running["trainer-0-x"]
        await asyncio.wait([ended, left], return_when=asyncio.FIRST_COMPLETED)
        if (
            not ended.done()
            and isinstance(died := left.result(), Exception)
            and not isinstance(died, TriremeError)
        ):
            ended.cancel()
            return Outcome(crashed=_lines(died))
        state = await ended
        if state.phase is Phase.COMPLETED:
            events = made.master.events.after(0, 1000)
            told = [event.message for event in events if event.name == "warning"]
            return Outcome(made.exported(), state.result.metrics, told=(before_the_run, *told))
        failure = state.failure
        if failure is None:
            return Outcome(refused=state.reason)
        return _refusal(f"{failure.error_type}: {failure.message}", failure.traceback)


JOBS: dict[str, dict[str, Any]] = {
    "ps": {},
    "collective": {"strategy": "collective", "pservers": 0},
    "async": {"mode": "async"},
}
SURFACES: dict[str, Callable[[Script], Outcome]] = {
    "python script.py": plain_functions,
    "python loop.py": plain_loop,
    "functions, parameter servers": lambda script: job(script, "ps", loop=False),
    "functions, collective": lambda script: job(script, "collective", loop=False),
    "functions, asynchronous": lambda script: job(script, "async", loop=False),
    "loop, parameter servers": lambda script: job(script, "ps", loop=True),
    "loop, collective": lambda script: job(script, "collective", loop=True),
    "loop, asynchronous": lambda script: job(script, "async", loop=True),
}


PARTS = (
    ("python script.py", "functions, parameter servers"),
    ("python loop.py", "loop, collective"),
    ("python script.py", "functions, collective"),
    ("python loop.py", "loop, parameter servers"),
    ("python script.py", "functions, asynchronous"),
    ("python loop.py", "loop, asynchronous"),
)


def surfaces_of(script: Script, part: int | None = None) -> dict[str, Callable[[Script], Outcome]]:
    """Those that the script has. `part`: the number of a part of them, to save time; any integer."""
    parts = PARTS if part is not None else (tuple(SURFACES),)
    # parameter servers write no checkpoints here, of which versions are evaluated while a job trains
    lacks = "parameter servers" if "evaluate_every" in script.settings else "none"
    has = [
        [name for name in names if lacks not in name and (script.has_functions or "loop" in name)]
        for names in parts
    ]
    has = [names for names in has if names]
    return {name: SURFACES[name] for name in has[(part or 0) % len(has)]}


def _outcome(train: Callable[[], Outcome]) -> Outcome:
    modules, threads = set(sys.modules), set(threading.enumerate())
    try:
        with _own_warnings(), _single_error(), _nothing_left():
            return train()
    except UserCodeError as error:
        return _refusal(f"{error.message} {error.hint}", str(error.details.get("traceback", "")))
    except TriremeError as error:
        return Outcome(refused=f"{error.message} {error.hint}")
    except (RuntimeError, TypeError, ValueError) as error:  # raised in a loop, where the script is wrong
        return _refusal(" ".join([str(error), *getattr(error, "__notes__", ())]), _lines(error))
    except BaseException as error:
        return Outcome(crashed=_lines(error))
    finally:
        for name in set(sys.modules) - modules:
            if name.startswith("fuzz_"):
                del sys.modules[name]
        for thread in set(threading.enumerate()) - threads:
            if thread.name in ("script", "trireme"):
                thread.join(0.01)


def _refusal(message: str, lines: str) -> Outcome:
    return Outcome(refused=f"{message}\n{lines}")


def _lines(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Those of torch about a script are no errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _single_error() -> Iterator[None]:
    """Of a TaskGroup."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Hooks of all optimizers, and settings of torch: those of a script would also be there in the next
    one."""
    hooks = [vars(optimizer)[f"_global_optimizer_{place}_hooks"] for place in ("pre", "post")]
    before = [dict(each) for each in hooks]
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with np.errstate(), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.autograd.set_multithreading_enabled(True)
        torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark = True, False
        for each, kept in zip(hooks, before, strict=True):
            each.clear()
            each.update(kept)


@contextmanager
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield
    finally:
        structlog.configure(**before)
        linecache.clearcache()
