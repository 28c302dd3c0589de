"""The order of an epoch: a permutation that is a function of (seed, epoch) alone, by arithmetic, in O(1) memory.

position --keyed Feistel over 2**(2k) >= n, repeated until inside [0, n)--> task number      (and back)

Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (cycle walking), rounds keyed by splitmix64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme_shared.protocol.lanes import step_seed

ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Bijection of [0, n). `shuffle` False is the identity. Cost: fewer than 4 walks of 6 rounds on average."""

    n: int
    seed: int
    epoch: int
    shuffle: bool = True
    half_bits: int = field(init=False)
    keys: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        bits = max(2, (self.n - 1).bit_length()) if self.n else 2
        object.__setattr__(self, "half_bits", (bits + 1) // 2)
        object.__setattr__(self, "keys", tuple(step_seed(self.seed, self.epoch, -1 - i) for i in range(ROUNDS)))

    def task_at(self, position: int) -> int:
        """The task number that stands at `position`."""
        self._check(position, "position")
        if not self.shuffle:
            return position
        value = self._encrypt(position)
        while value >= self.n:
            value = self._encrypt(value)
        return value

    def position_of(self, task: int) -> int:
        """Where task number `task` stands: the inverse of `task_at`."""
        self._check(task, "task")
        if not self.shuffle:
            return task
        value = self._decrypt(task)
        while value >= self.n:
            value = self._decrypt(value)
        return value

    def _check(self, value: int, what: str) -> None:
        if not 0 <= value < self.n:
            msg = f"{what} {value} is outside [0, {self.n})"
            raise IndexError(msg)

    def _encrypt(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_round(right, key) & mask)
        return (left << self.half_bits) | right

    def _decrypt(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in reversed(self.keys):
            left, right = right ^ (_round(left, key) & mask), left
        return (left << self.half_bits) | right


def _round(value: int, key: int) -> int:
    mixed = ((value ^ key) * 0xBF58476D1CE4E5B9) & _MASK
    mixed ^= mixed >> 29
    mixed = (mixed * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)
