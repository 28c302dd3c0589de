"""DeepFM of examples/deepfm/clicks.py with Paddle's parameter server, asynchronous. Started by
benchmarks/tables/deepfm.py as a server and trainers, in a virtual environment with paddlepaddle. A trainer
has its samples in memory and trains until it is killed; after each step it writes the time and the loss into
the file STEPS."""

import itertools
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import fleet

FIELDS, DENSE, DIM, WIDTHS, LR = 26, 13, 15, (128, 64), 0.002


def network():
    """The loss, of columns `ids`, `dense`, `clicked`."""
    ids = paddle.static.data("ids", [-1, 1], "int64")  # those of all fields of a batch, one after the other
    dense = paddle.static.data("dense", [-1, DENSE], "float32")
    clicked = paddle.static.data("clicked", [-1, 1], "float32")
    uniform = paddle.ParamAttr(name="rows", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    # any number of rows
    rows = paddle.static.nn.sparse_embedding(ids, [1 << 20, 1 + DIM], param_attr=uniform)
    rows = paddle.reshape(rows, [-1, FIELDS, 1 + DIM])
    weights, vectors = rows[:, :, 0], rows[:, :, 1:]
    pairs = (paddle.square(vectors.sum(1)) - paddle.square(vectors).sum(1)).sum(1, keepdim=True) / 2
    seen = paddle.concat([paddle.reshape(vectors, [-1, FIELDS * DIM]), dense], 1)
    for _, narrow in pairwise((FIELDS * DIM + DENSE, *WIDTHS)):
        seen = paddle.static.nn.fc(seen, narrow, activation="relu")
    scores = weights.sum(1, keepdim=True) + pairs + paddle.static.nn.fc(seen, 1)
    return paddle.nn.functional.binary_cross_entropy_with_logits(scores, clicked)


def main():
    paddle.enable_static()
    fleet.init(is_collective=False)
    loss = network()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adam(LR), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    batch, rank, ranks = (
        int(os.environ["BATCH"]),
        int(os.environ["PADDLE_TRAINER_ID"]),
        int(os.environ["PADDLE_TRAINERS_NUM"]),
    )
    columns = {
        name: np.load(Path(os.environ["SAMPLES"]) / f"{name}.npy") for name in ("ids", "dense", "clicked")
    }
    shapes = {"ids": (-1, 1), "dense": (-1, DENSE), "clicked": (-1, 1)}
    begins = range(rank * batch, len(columns["clicked"]) - batch + 1, ranks * batch)
    feeds = [
        {name: whole[at : at + batch].reshape(shapes[name]) for name, whole in columns.items()}
        for at in begins
    ]
    program = paddle.static.default_main_program()
    with Path(os.environ["STEPS"]).open("w", buffering=1) as file:
        for feed in itertools.cycle(feeds):
            (found,) = executor.run(program, feed=feed, fetch_list=[loss])
            file.write(f"{time.monotonic()} {float(np.mean(found))}\n")


main()
