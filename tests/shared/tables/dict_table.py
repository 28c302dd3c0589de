"""A table as a dict, one id at a time: what trireme_shared.tables.table has to do. Steps are torch's own
where torch has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.hashing import GOLDEN, hashes_of, mix64, slots_of

Row = dict[int, np.ndarray]


@dataclass
class _Entry:
    values: np.ndarray  # of the row: values, then state
    stamp: int


def initial(spec: TableSpec, key: int) -> np.ndarray:
    base = mix64(hashes_of(np.array([key], np.int64), spec.seed) ^ GOLDEN)
    scale, values = spec.init.scale, np.empty(spec.dim, np.float32)
    with np.errstate(over="ignore"):
        if spec.init.kind == "constant":
            values[:] = scale
        elif spec.init.kind == "uniform":
            bits = mix64(base + np.arange(spec.dim, dtype=np.uint64) * GOLDEN) >> np.uint64(40)
            unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
            values[:] = unit * np.float32(scale)
        else:
            bits = mix64(base + np.arange(2 * spec.dim, dtype=np.uint64) * GOLDEN)
            parts = sum(
                ((bits >> np.uint64(16 * part)) & np.uint64(65535)).astype(np.int64) for part in range(4)
            )
            total = parts.reshape(spec.dim, 2).sum(1).astype(np.float32)
            values[:] = (total - np.float32(4 * 65535)) * np.float32(scale / 53509.913)
    return values


class DictTable:
    def __init__(self, spec: TableSpec, slot_count: int) -> None:
        self.spec, self.slots, self.version, self.updates = spec, slot_count, 0, 0
        self.entries: dict[int, _Entry] = {}
        self.past: dict[int, _Entry] = {}
        self.seen: dict[int, int] = {}

    def lookup(self, ids: np.ndarray, version: int | None = None) -> np.ndarray:
        wanted = self.version if version is None else version
        entries = self.entries if wanted == self.version else self.past
        rows = [self._of(entries, int(key), wanted) for key in ids]
        return np.stack(rows) if rows else np.empty((0, self.spec.dim), np.float32)

    def _of(self, entries: dict[int, _Entry], key: int, version: int) -> np.ndarray:
        entry = entries.get(key)
        if entry is None or self.is_expired(entry, version):
            return initial(self.spec, key)
        return entry.values[: self.spec.dim]

    def is_expired(self, entry: _Entry, version: int) -> bool:
        ttl = self.spec.evict_after_steps
        return ttl is not None and version - entry.stamp > ttl

    def step(self, ids: np.ndarray, gradients: np.ndarray | None, lr: float | None = None) -> None:
        self.past = {key: _Entry(e.values.copy(), e.stamp) for key, e in self.entries.items()}
        self.version += 1
        if gradients is not None:
            self._step(ids, gradients, lr)
        for key in [key for key in self.entries if self._is_swept(self._slot(key))]:
            if self.is_expired(self.entries[key], self.version - 1):
                del self.entries[key]

    def _step(self, ids: np.ndarray, gradients: np.ndarray, lr: float | None) -> None:
        self.updates += 1
        coming = []
        for key in map(int, ids):
            if key not in self.entries:
                self.seen[key] = self.seen.get(key, 0) + 1
                if self.seen[key] >= self.spec.admit_after:
                    coming.append(key)
        self._make_room(coming, set(map(int, ids)))
        for key, gradient in zip(map(int, ids), gradients, strict=True):
            entry = self.entries.get(key)
            if entry is None and key not in coming:
                continue
            if entry is None or self.is_expired(entry, self.version - 1):
                rest = np.zeros(self.spec.row_words - self.spec.dim, np.float32)
                if self.spec.optimizer.kind in ("adagrad", "ftrl"):  # of both the sum of squares is last
                    squares = rest[-1:] if self.spec.optimizer.per_row else rest[-self.spec.dim :]
                    squares[:] = self.spec.optimizer.initial_accumulator_value
                entry = self.entries[key] = _Entry(np.concatenate([initial(self.spec, key), rest]), 0)
            entry.stamp = self.version
            self._update(entry.values, gradient, self.spec.optimizer.lr if lr is None else lr)

    def _is_swept(self, slot: int) -> bool:
        """Each slot once in a 128th of `evict_after_steps` steps, or in each step."""
        turns = min(max(1, (self.spec.evict_after_steps or 1) // 128), self.slots)
        return int((slot + 1) * turns - 1) // self.slots == self.version % turns

    def _slot(self, key: int) -> int:
        return int(slots_of(np.array([key], np.int64), self.spec.seed, self.slots)[0])

    def _make_room(self, coming: list[int], touched: set[int]) -> None:
        if self.spec.max_rows is None:
            return
        shared, extra = divmod(self.spec.max_rows, self.slots)
        slot = self._slot
        for number in {slot(key) for key in coming}:
            quota = shared + (number < extra)
            mine = [key for key in self.entries if slot(key) == number]
            idle = sorted((self.entries[key].stamp, key) for key in mine if key not in touched)
            new = [key for key in coming if slot(key) == number]
            room = max(0, quota - (len(mine) - len(idle)))
            for key in new[room:]:
                coming.remove(key)
            for _, key in idle[: max(0, len(mine) + len(new[:room]) - quota)] if new[:room] else ():
                del self.entries[key]

    def _update(self, row: np.ndarray, gradient: np.ndarray, lr: float) -> None:
        spec, dim = self.spec.optimizer, self.spec.dim
        weight = torch.nn.Parameter(torch.tensor(row[:dim].tolist(), dtype=torch.float32).reshape(1, dim))
        index, values = (
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor(gradient.tolist(), dtype=torch.float32).reshape(1, dim),
        )
        weight.grad = torch.sparse_coo_tensor(
            index, values, (1, dim), is_coalesced=True, check_invariants=False
        )
        state = torch.tensor(row[dim:])
        if spec.kind == "sgd":
            torch.optim.SGD([weight], lr=lr).step()
        elif spec.kind == "adagrad" and not spec.per_row:
            optimizer = torch.optim.Adagrad([weight], lr=lr, eps=spec.eps)
            optimizer.state[weight]["sum"] = state.reshape(1, dim)
            optimizer.step()
            row[dim:] = optimizer.state[weight]["sum"].numpy()[0]
        elif spec.kind == "adam":
            adam = torch.optim.SparseAdam([weight], lr=lr, betas=spec.betas, eps=spec.eps)
            first, second = state[:dim].reshape(1, dim).clone(), state[dim:].reshape(1, dim).clone()
            adam.state[weight].update(step=self.updates - 1, exp_avg=first, exp_avg_sq=second)
            adam.step()
            row[dim : 2 * dim], row[2 * dim :] = first.numpy()[0], second.numpy()[0]
        elif spec.kind == "adagrad":
            grown = np.float64(row[dim]) + np.mean(np.float64(gradient) ** 2)
            weight.data[0] -= torch.tensor(lr * gradient / (np.sqrt(grown) + spec.eps))
            row[dim] = grown
        else:
            g, w, z, total = (
                np.float64(part) for part in (gradient, row[:dim], row[dim : 2 * dim], row[2 * dim :])
            )
            grown = total + g * g
            z = z + g * (lr / spec.lr) - (np.sqrt(grown) - np.sqrt(total)) / spec.lr * w
            found = -(z - np.sign(z) * spec.l1) / ((spec.beta + np.sqrt(grown)) / spec.lr + spec.l2)
            row[dim : 2 * dim], row[2 * dim :] = z, grown
            weight.data[0] = torch.tensor(np.where(np.abs(z) <= spec.l1, 0.0, found))
        row[:dim] = weight.detach().numpy()[0]
