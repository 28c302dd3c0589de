"""Plain PyTorch, and DistributedDataParallel over gloo, training a user's script; steps.py starts one of
these per rank.

    python -m benchmarks.torch_steps SCRIPT --batch 256 --ranks 2 --rank 0 --store FILE --steps FILE [--tuned]
                                     [--batches 16] [--threads 1]
    python -m benchmarks.torch_steps SCRIPT --batch 256 --ranks 2 --rank 0 --store FILE --epochs 2
    python -m benchmarks.torch_steps SCRIPT --batch 256 --activations

The batches lie in memory before the first step: reading costs these rows nothing. Trains until it is killed;
rank 0 writes the time after each step into a file. --epochs: so many passes over all batches instead, in one
order; then each rank prints what the evaluation dataset's metrics are, as JSON. --tuned: DDP with the options
that make it fastest here, and memory as our trainers get it (the parent sets malloc.TUNABLES); without, as
torch is by default. With --activations a few steps' forward and backward only: prints the bytes that the
process took, at the highest, beyond its parameters and their gradients.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measurements import Memory
from master_service.core.queue.file_table import TaskSizes
from master_service.storage.job_storage import count_records
from trainer_agent.data import Minibatch, default_collate
from trainer_agent.script import user_module
from trainer_agent.script.user_module import UserModule
from trireme.plain import epoch_minibatches, plain_spec
from trireme_shared.platform.runtime import clock, process_setup

BATCHES = 16
FEW = 5
TUNED = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 8}


def batches_of(user: UserModule, batch: int, rank: int, ranks: int, most: int | None) -> list[Any]:
    """This rank's shares of the first global batches, at most so many, collated. None: of a whole epoch, as
    often as all ranks have one."""
    spec = plain_spec(user, {"global_batch_size": batch // ranks})
    minibatches = list(
        islice(
            epoch_minibatches(spec, count_records(spec.dataset, TaskSizes.of(spec)), 0), most and most * ranks
        )
    )
    return [_collated(user, share) for share in minibatches[rank : len(minibatches) // ranks * ranks : ranks]]


def _collated(user: UserModule, share: Minibatch) -> Any:
    return user.call("collate", list(share)) if user.has("collate") else default_collate(share)


def train(
    user: UserModule,
    batches: list[Any],
    ranks: int,
    steps: Path | None,
    *,
    tuned: bool,
    numbers: Iterable[int],
) -> nn.Module:
    """One step for each of the numbers."""
    torch.manual_seed(1)
    model: nn.Module = user.call("model")
    optimizer = user.call("optimizer", model)
    scheduler = user.call("scheduler", optimizer) if user.has("scheduler") else None
    options: dict[str, Any] = TUNED if tuned else {}
    wrapped = nn.parallel.DistributedDataParallel(model, **options) if ranks > 1 else model
    with (steps or Path("/dev/null")).open("w", buffering=1) as file:
        for number in numbers:
            optimizer.zero_grad()
            user.call("loss", wrapped, batches[number % len(batches)]).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            file.write(f"{clock.monotonic()}\n")
    return model


def evaluated(user: UserModule, model: nn.Module, batch: int) -> dict[str, float]:
    """The script's metrics of its evaluation dataset."""
    spec = plain_spec(user, {"global_batch_size": batch})
    spec = spec.model_copy(update={"dataset": spec.evaluation_dataset})
    model.eval()
    sums: Counter[str] = Counter()
    with torch.no_grad():
        for minibatch in epoch_minibatches(spec, count_records(spec.dataset, TaskSizes.of(spec)), 0):
            sums.update(
                {
                    name: float(each)
                    for name, each in user.call("evaluate", model, _collated(user, minibatch)).items()
                }
            )
    return {name: float(value) for name, value in user.call("metrics", sums).items()}


def activations(user: UserModule, batches: list[Any]) -> int:
    memory = Memory()
    model: nn.Module = user.call("model")
    for batch in batches[:FEW]:
        model.zero_grad(set_to_none=False)
        user.call("loss", model, batch).backward()
    return memory.peak() - 2 * sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--steps", type=Path)
    parser.add_argument("--batches", type=int, default=BATCHES, help="that are trained again and again")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--activations", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.tuned:
        process_setup.give_memory_back()
    user = user_module.load(given.script)
    batches = batches_of(user, given.batch, given.rank, given.ranks, None if given.epochs else given.batches)
    if given.activations:
        print(activations(user, batches))
        return
    if given.ranks > 1:
        store = dist.FileStore(given.store, given.ranks)
        dist.init_process_group("gloo", store=store, rank=given.rank, world_size=given.ranks)
    numbers: Iterable[int] = range(given.epochs * len(batches)) if given.epochs else count()
    model = train(
        user,
        batches,
        given.ranks,
        given.steps if given.rank == 0 else None,
        tuned=given.tuned,
        numbers=numbers,
    )
    print(json.dumps(evaluated(user, model, given.batch)))


if __name__ == "__main__":
    main()
