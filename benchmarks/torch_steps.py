"""Plain PyTorch, and DistributedDataParallel over gloo, training a user's script; steps.py starts one of these per rank.

    python -m benchmarks.torch_steps SCRIPT --batch 256 --ranks 2 --rank 0 --store FILE --seconds 8

The batches lie in memory before the clock starts: reading costs these rows nothing. Rank 0 prints {"steps", "seconds"}.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from master_service.dataset import count_records
from shared import clock
from trainer_agent import user_module
from trainer_agent.data import default_collate
from trainer_agent.user_module import UserModule
from trireme.plain import epoch_minibatches, plain_spec

BATCHES = 16
WARM_UP = 5
LOOK_EVERY = 4


def batches_of(user: UserModule, batch: int, rank: int, ranks: int) -> list[Any]:
    """This rank's shares of the first global batches, collated."""
    spec = plain_spec(user, {"global_batch_size": batch // ranks})
    found = islice(epoch_minibatches(spec, count_records(spec.dataset, spec.task_records), 0), rank, None, ranks)
    return [
        user.call("collate", list(share)) if user.has("collate") else default_collate(share)
        for share in islice(found, BATCHES)
    ]


def train(user: UserModule, batches: list[Any], ranks: int, seconds: float) -> tuple[int, float]:
    """(steps, seconds they took). All ranks do the same number of steps: rank 0 says when it is over."""
    torch.manual_seed(1)
    model: nn.Module = user.call("model")
    optimizer = user.call("optimizer", model)
    scheduler = user.call("scheduler", optimizer) if user.has("scheduler") else None
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    steps, started, going_on = 0, 0.0, torch.ones(1)
    while going_on:
        if steps == WARM_UP:
            started = clock.monotonic()
        optimizer.zero_grad()
        user.call("loss", wrapped, batches[steps % len(batches)]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        steps += 1
        if steps > WARM_UP and (steps - WARM_UP) % LOOK_EVERY == 0:
            going_on[0] = clock.monotonic() - started < seconds
            if ranks > 1:
                dist.broadcast(going_on, 0)
    return steps - WARM_UP, clock.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.ranks > 1:
        store = dist.FileStore(given.store, given.ranks)
        dist.init_process_group("gloo", store=store, rank=given.rank, world_size=given.ranks)
    user = user_module.load(given.script)
    steps, took = train(user, batches_of(user, given.batch, given.rank, given.ranks), given.ranks, given.seconds)
    if given.rank == 0:
        print(json.dumps({"steps": steps, "seconds": took}))
    if given.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
