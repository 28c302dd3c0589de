"""Ray: an actor holds the parameters. Started by benchmarks/other_systems in a virtual environment that has
ray and numpy only."""

import json
import sys
import time

import numpy as np
import ray


@ray.remote
class Server:
    def setup(self, elements, lr):
        self.values, self.scratch, self.lr = (
            np.zeros(elements, np.float32),
            np.empty(elements, np.float32),
            lr,
        )

    def step(self, gradient):
        np.multiply(gradient, np.float32(self.lr), out=self.scratch)
        np.subtract(self.values, self.scratch, out=self.values)
        return self.values


def main():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    server, gradient, values, rounds = Server.remote(), None, None, 0
    for line in sys.stdin:
        name, given = json.loads(line)
        answer = None
        if name == "setup":
            gradient, rounds = np.resize(np.array(given["period"], np.float32), given["elements"]), 0
            ray.get(server.setup.remote(given["elements"], given["lr"]))
        elif name == "round":
            start = time.perf_counter()
            values = ray.get(server.step.remote(gradient))
            answer, rounds = time.perf_counter() - start, rounds + 1
        elif name == "first":
            answer = [rounds, values[: given["count"]].tolist()]
        print(json.dumps({"answer": answer}), flush=True)


main()
