"""The scalars of one step of a table, rounded to float32 as torch rounds a Python number that meets a float32 tensor."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.kernels import rows as row_loops

INITS = {"constant": row_loops.CONSTANT, "uniform": row_loops.UNIFORM, "normal": row_loops.NORMAL}


def kind_of(optimizer: RowOptimizer) -> int:
    """Of row_loops.update."""
    match optimizer.kind:
        case "sgd":
            return row_loops.SGD
        case "adagrad":
            return row_loops.ADAGRAD_ROW if optimizer.per_row else row_loops.ADAGRAD
        case "adam":
            return row_loops.ADAM
        case "ftrl":
            return row_loops.FTRL


def scalars_of(optimizer: RowOptimizer, step: int, dim: int, lr: float) -> npt.NDArray[np.float32]:
    """For row_loops.update; `step`: of the table, counted from 1."""
    match optimizer.kind:
        case "sgd":
            found = [-lr]
        case "adagrad":
            found = [-lr, optimizer.eps, 1.0 / dim]
        case "adam":
            first, second = optimizer.betas
            size = lr * math.sqrt(1 - second**step) / (1 - first**step)
            found = [-size, optimizer.eps, 1 - first, 1 - second]
        case "ftrl":  # a row is computed from sums that were made at the table's own rate, so another rate scales the gradient's effect
            rate = 1.0 / optimizer.lr
            found = [lr / optimizer.lr, optimizer.l1, optimizer.l2, optimizer.beta * rate, rate]
    return np.array(found + [0.0] * (8 - len(found)), np.float32)


def first_state(optimizer: RowOptimizer, dim: int) -> npt.NDArray[np.float32]:
    """The state of a row that appears: float32 (optimizer.state_words(dim),). `initial_accumulator_value` fills sums of squares alone."""
    state = np.zeros(optimizer.state_words(dim), np.float32)
    match optimizer.kind:
        case "adagrad":
            state[:] = optimizer.initial_accumulator_value
        case "ftrl":
            state[dim:] = optimizer.initial_accumulator_value
    return state


def sums_of_values(optimizer: RowOptimizer, rows: npt.NDArray[np.float32], dim: int) -> None:
    """In place: rows (float32 (n, dim + words of state)) of `ftrl` get the sums that their values follow from, at this learning rate, l1, l2 and beta.
    Without them the first step would compute each row from sums that know nothing of its values."""
    values, sums, squares = (rows[:, first : first + dim].astype(np.float64) for first in (0, dim, 2 * dim))
    strength = (optimizer.beta + np.sqrt(squares)) / optimizer.lr + optimizer.l2
    held = np.clip(sums, -optimizer.l1, optimizer.l1)  # these keep a value at 0
    rows[:, dim : 2 * dim] = np.where(values == 0, held, -values * strength - np.sign(values) * optimizer.l1)


def init_scale(init: RowInit) -> np.float32:
    """For row_loops.initial_values: what its numbers are multiplied by."""
    return np.float32(init.scale / row_loops.NORMAL_DEVIATION if init.kind == "normal" else init.scale)


def initial_values(spec: TableSpec, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Of ids without a row: float32 (n, dim)."""
    found = np.empty((len(ids), spec.dim), np.float32)
    row_loops.initial_values(np.uint64(spec.seed), ids, INITS[spec.init.kind], init_scale(spec.init), found)
    return found
