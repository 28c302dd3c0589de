"""Paddle's parameter server, asynchronous: a sparse table with Adam, looked up and stepped by static
programs. Started by benchmarks/tables/peers.py twice, with TRAINING_ROLE PSERVER and TRAINER, in a virtual
environment with paddlepaddle.

Each kind of work is tried with ids as given and with each id once, and done in the faster form. Steps are
timed until they are sent: what waits in the client is not waited for, since its trainers do not either
(client_flush takes 0.1 s by its sleeps). So the figure is an upper bound.
"""

import os
import time

import numpy as np
import paddle
from paddle.distributed import fleet

from benchmarks.tables.minibatches import LR, SCALE, Minibatches
from benchmarks.tables.replies import serve

TRIES, FOLLOWED, FOLLOWED_STEPS = 3, 500, 4
BETAS, EPS = (0.9, 0.999), 1e-8


class Table:
    def __init__(self, dim):
        self.ids = paddle.static.data("ids", [-1, 1], "int64")
        self.gradients = paddle.static.data("gradients", [-1, dim], "float32")
        uniform = paddle.ParamAttr(name="rows", initializer=paddle.nn.initializer.Uniform(-SCALE, SCALE))
        # any number of rows
        found = paddle.static.nn.sparse_embedding(self.ids, [1 << 20, dim], param_attr=uniform)
        self.rows = paddle.reshape(found, [-1, dim])
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(LR), strategy)
        optimizer.minimize(paddle.sum(self.rows * self.gradients))
        self.training = paddle.static.default_main_program()

    def begin(self):
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self.executor.run(paddle.static.default_startup_program())
        fleet.init_worker()
        self.reading = self.training.clone(for_test=True)
        runtime = vars(fleet.fleet)["_runtime_handle"]  # nothing public waits for the server
        self.flush = vars(runtime)["_worker"].client_flush

    def setup(self, rows, dim, ids, _initial):
        """Its rows begin as its own generator makes them. All exist then, by steps without a gradient."""
        self.data = Minibatches(rows, dim, ids)
        for part in self.data.pieces():
            self.push(part, np.zeros((len(part), dim), np.float32))
            self.flush()
        self.look_up, how = self.fastest({"as given": self.read, "each id once": self.read_once})
        nothing = np.zeros((ids, dim), np.float32)
        forms = {"as given": self.push, "each id once": self.push_once}
        timed = {name: lambda some, work=work: work(some, nothing) for name, work in forms.items()}
        _, how_step = self.fastest(timed)
        self.update = forms[how_step]
        self.flush()
        return {"lookup": how, "step": how_step}

    def fastest(self, forms):
        ids, best = self.data.of(-1), None
        for name, work in forms.items():
            took = []
            for _ in range(1 + TRIES):
                begin = time.perf_counter()
                work(ids)
                took.append(time.perf_counter() - begin)
            if best is None or min(took[1:]) < best[0]:
                best = (min(took[1:]), work, name)
        return best[1:]

    def read(self, ids):
        feed = {"ids": ids.reshape(-1, 1)}
        return self.executor.run(self.reading, feed=feed, fetch_list=[self.rows], use_prune=True)[0]

    def read_once(self, ids):
        different, places = np.unique(ids, return_inverse=True)
        return np.take(self.read(different), places, axis=0)

    def push(self, ids, gradients):
        self.executor.run(self.training, feed={"ids": ids.reshape(-1, 1), "gradients": gradients})

    def push_once(self, ids, gradients):
        different, sums = summed(ids, gradients)
        self.push(different, sums)

    def lookup(self, number):
        ids = self.data.of(number)
        begin = time.perf_counter()
        self.look_up(ids)
        return time.perf_counter() - begin

    def small(self, number):
        ids = self.data.few(number)
        begin = time.perf_counter()
        self.read(ids)
        return time.perf_counter() - begin

    def steps(self, numbers):
        given = [(self.data.of(number), self.data.gradients(number)) for number in numbers]
        begin = time.perf_counter()
        for ids, gradients in given:
            self.update(ids, gradients)
        took = time.perf_counter() - begin
        self.flush()
        return took

    def wrong(self):
        """Steps of rows that nobody had, with repetitions, each applied before the next, against Adam in
        float64: the largest difference, and the largest change. Adam counts the steps of each row there, and
        for its first number also the one that made it. Once."""
        rng = np.random.default_rng(5)
        ids = (1 << 62) + np.arange(FOLLOWED)
        self.push(ids, np.zeros((FOLLOWED, self.data.dim), np.float32))
        self.flush()
        first = self.read(ids).astype(np.float64)
        values, moments, counts = first.copy(), np.zeros((2, *first.shape)), np.zeros_like(first)
        counts[:, 0] = 1
        for _ in range(FOLLOWED_STEPS):
            places = rng.integers(0, FOLLOWED, 2 * FOLLOWED)
            gradients = rng.standard_normal((len(places), self.data.dim), np.float32)
            self.update(ids[places], gradients)
            self.flush()
            stepped, sums = summed(places, gradients)
            counts[stepped] += 1
            for power, beta in enumerate(BETAS):
                moments[power, stepped] = beta * moments[power, stepped] + (1 - beta) * sums ** (power + 1)
            one, two = (1 - beta ** counts[stepped] for beta in BETAS)
            values[stepped] -= (
                LR * np.sqrt(two) / one * moments[0, stepped] / (np.sqrt(moments[1, stepped]) + EPS)
            )
        return [float(np.abs(self.read(ids) - values).max()), float(np.abs(values - first).max())]


def summed(ids, gradients):
    different, places = np.unique(ids, return_inverse=True)
    order = np.argsort(places, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(places))[:-1]])
    return different, np.add.reduceat(gradients[order], begins, axis=0) if len(ids) else gradients


def main():
    paddle.enable_static()
    fleet.init(is_collective=False)
    table = Table(int(os.environ["TABLE_DIM"]))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    table.begin()
    served = {name: getattr(table, name) for name in ("setup", "lookup", "small", "steps", "wrong")}
    serve(served | {"ready": lambda: True})


main()
