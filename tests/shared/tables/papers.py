"""Row optimizers as papers define them, in float64 and from everything that has happened to one row: no
recurrence, no sums that are kept."""

from __future__ import annotations

import numpy as np

from trireme_shared.protocol.records.layout import RowOptimizer


class RowAdagrad:
    """Adagrad with one accumulator a row, which is the mean over its columns (`per_row`)."""

    def __init__(self, optimizer: RowOptimizer, values: np.ndarray) -> None:
        self._optimizer, self.values = optimizer, np.float64(values)
        self._gradients: list[np.ndarray] = []

    def step(self, gradient: np.ndarray, lr: float) -> None:
        self._gradients.append(np.float64(gradient))
        grown = self._optimizer.initial_accumulator_value + sum(np.mean(each**2) for each in self._gradients)
        self.values = self.values - lr * self._gradients[-1] / (np.sqrt(grown) + self._optimizer.eps)


class FtrlProximal:
    """McMahan 2011, "Follow-the-Regularized-Leader and Mirror Descent", and McMahan et al. 2013, section 3.1:
    after step t the values are what minimises

        g_1 w + ... + g_t w  +  sigma_1 |w - w_1|^2 / 2 + ... + sigma_t |w - w_t|^2 / 2
        +  l1 |w|  +  (l2 + (beta + sqrt n_0) / lr) w^2 / 2

    with sigma_1 + ... + sigma_t = (sqrt n_t - sqrt n_0) / lr and n_t = n_0 + g_1^2 + ... + g_t^2. Keras's
    Ftrl is the same with its learning_rate_power -0.5 and its l2_regularization_strength l2 / 2. A step with
    another rate than the optimizer's counts its gradient by their ratio in the first sum alone."""

    def __init__(self, optimizer: RowOptimizer, values: np.ndarray) -> None:
        self._optimizer, self.values = optimizer, np.float64(values)
        # gradient, the values before, how much it counts
        self._steps: list[tuple[np.ndarray, np.ndarray, float]] = []

    def step(self, gradient: np.ndarray, lr: float) -> None:
        own = self._optimizer
        self._steps.append((np.float64(gradient), self.values, lr / own.lr))
        total = np.full(len(gradient), own.initial_accumulator_value)
        slope, weight = np.zeros(len(gradient)), own.l2 + (own.beta + np.sqrt(total)) / own.lr
        for each, before, share in self._steps:
            sigma = (np.sqrt(total + each**2) - np.sqrt(total)) / own.lr
            slope, weight, total = slope + share * each - sigma * before, weight + sigma, total + each**2
        self.values = (
            -np.sign(slope) * np.maximum(np.abs(slope) - own.l1, 0) / np.where(weight > 0, weight, 1)
        )
