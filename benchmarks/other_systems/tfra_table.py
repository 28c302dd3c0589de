"""TFRA: a CuckooHashTable in process, with Adam. Started by benchmarks/tables/peers.py in a virtual
environment with TensorFlow and TFRA.

Each kind of work is tried in several forms (eager or compiled; lookups with each id once or as given) and
done in the fastest.
"""

import os
import time
from pathlib import Path

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from benchmarks.tables.minibatches import FILL, LR, Minibatches
from benchmarks.tables.replies import serve

TRIES = 3


class Table:
    def setup(self, rows, dim, ids, initial):
        """`initial`: a .npy file, the values of each row."""
        self.data = Minibatches(rows, dim, ids)
        before = _resident()
        self.rows = de.get_variable(
            "t", tf.int64, tf.float32, dim=dim, initializer=0.0, devices=["/CPU:0"], init_size=rows
        )
        first = np.load(initial, mmap_mode="r")
        for begin in range(0, len(first), FILL):
            part = slice(begin, begin + FILL)
            self.rows.upsert(tf.constant(self.data.all[part]), tf.constant(first[part]))
        self.bytes_a_row = (_resident() - before) / self.data.rows
        self.shadow = de.shadow_ops.ShadowVariable(self.rows, name="shadow")
        self.optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adam(LR, epsilon=1e-8))
        ids_of, gradients_of = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, dim], tf.float32)
        lookups = {"as given": self.rows.lookup, "each id once": self.once}
        compiled = {f"{name}, compiled": tf.function(work, [ids_of]) for name, work in lookups.items()}
        self.look_up, how = self.fastest(lookups | compiled, gradients=False)
        # as given, one of an id's gradients is taken instead of their sum
        steps = {"each id once": self.step_once}
        compiled = {
            f"{name}, compiled": tf.function(work, [ids_of, gradients_of]) for name, work in steps.items()
        }
        self.update, how_step = self.fastest(compiled | steps, gradients=True)
        # those without a gradient count, as everybody's
        self.optimizer.iterations.assign(len(self.data.pieces()))
        return {"lookup": how, "step": how_step}

    def fastest(self, forms, *, gradients):
        best = None
        for name, work in forms.items():
            ids, nothing = tf.constant(self.data.of(-1)), tf.zeros([self.data.ids, self.data.dim])
            given = (ids, nothing) if gradients else (ids,)  # without a gradient no value changes
            took = []
            for _ in range(1 + TRIES):
                begin = time.perf_counter()
                work(*given)
                took.append(time.perf_counter() - begin)
            if best is None or min(took[1:]) < best[0]:
                best = (min(took[1:]), work, name)
        return best[1:]

    def once(self, ids):
        different, places = tf.unique(ids)
        return tf.gather(self.rows.lookup(different), places)

    def step(self, ids, gradients):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.shadow_ops.embedding_lookup(self.shadow, ids) * gradients)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, [self.shadow]), [self.shadow], strict=True))

    def step_once(self, ids, gradients):
        different, places = tf.unique(ids)
        self.step(different, tf.math.unsorted_segment_sum(gradients, places, tf.size(different)))

    def lookup(self, number):
        ids = tf.constant(self.data.of(number))
        begin = time.perf_counter()
        self.look_up(ids).numpy()
        return time.perf_counter() - begin

    def small(self, number):
        ids = tf.constant(self.data.few(number))
        begin = time.perf_counter()
        self.look_up(ids).numpy()
        return time.perf_counter() - begin

    def steps(self, numbers):
        given = [
            (tf.constant(self.data.of(number)), tf.constant(self.data.gradients(number)))
            for number in numbers
        ]
        begin = time.perf_counter()
        for ids, gradients in given:
            self.update(ids, gradients)
        return time.perf_counter() - begin

    def found(self, number, path):
        np.save(path, self.look_up(tf.constant(self.data.of(number))).numpy())

    def memory(self):
        """Bytes a row, without the optimizer's: those of a row are made by its first step."""
        return self.bytes_a_row


def _resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


def main():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    table = Table()
    serve({name: getattr(table, name) for name in ("setup", "lookup", "small", "steps", "found", "memory")})


main()
