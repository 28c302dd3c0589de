"""MXNet's parameter server (ps-lite): keys of 1 MiB, the server runs SGD. Started by benchmarks/other_systems
three times, with DMLC_ROLE scheduler, server and worker, in a virtual environment that has mxnet and numpy
only."""

import json
import os
import sys
import time

import numpy as np

# mxnet 1.9.1 asks numpy for names that newer ones have dropped
for missing in ("bool", "int", "float", "object"):
    if missing not in vars(np):
        setattr(np, missing, getattr(__builtins__, missing))
import mxnet as mx  # noqa: E402  schedulers and servers do their work in this import

KEY_ELEMENTS = 1 << 18


def main():
    store = mx.kv.create("dist_sync")
    keys, parts, gradients, values, rounds, used = [], [], [], [], 0, 0
    for line in sys.stdin:
        name, given = json.loads(line)
        answer = None
        if name == "setup":
            store.set_optimizer(mx.optimizer.SGD(learning_rate=given["lr"], wd=0.0))
            whole = np.resize(np.array(given["period"], np.float32), given["elements"])
            parts = [whole[at : at + KEY_ELEMENTS] for at in range(0, len(whole), KEY_ELEMENTS)]
            keys, used, rounds = list(range(used, used + len(parts))), used + len(parts), 0
            gradients, values = (
                [mx.nd.array(part) for part in parts],
                [mx.nd.zeros(part.shape) for part in parts],
            )
            store.init(keys, values)
            mx.nd.waitall()
        elif name == "round":
            for gradient, part in zip(gradients, parts):  # noqa: B905  a pull lands in what was pushed
                gradient[:] = part
            mx.nd.waitall()
            start = time.perf_counter()
            store.push(keys, gradients)
            store.pull(keys, out=values)
            mx.nd.waitall()
            answer, rounds = time.perf_counter() - start, rounds + 1
        elif name == "first":
            answer = [rounds, values[0].asnumpy()[: given["count"]].tolist()]
        print(json.dumps({"answer": answer}), flush=True)


if os.environ["DMLC_ROLE"] == "worker":
    main()
