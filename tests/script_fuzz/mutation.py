"""What one part of a generated script does differently from a plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STEP = 3  # the step at which a mutation that waits for one acts, counted from 0


@dataclass(frozen=True)
class Mutation:
    """Code for the places of a script (see script.py). `names`: words of which a refusal must have one,
    ignoring case; () means that the script has to be trained with the bits of plain PyTorch. `async_names`:
    those of asynchronous jobs alone; `loop_names`: those of loops of a script's own alone.

    Statements: `head` at the module's top; `init` and `forward` in the model's class, where `h` is the hidden
    layer; `build` with the model `m`; `prepared` with the model `m` and its `opt`; `loss` with `model`,
    `batch`, `step`, `out` and `value`. Those of loops alone, with `model`, `opt`, `batch`, `value` and
    `step`: `top` before the forward pass, `between` backward and step, `after` the step. Expressions:
    `optimizer` of `m`; `loader` instead of the dataset, of `rows()`; `scheduler` of `opt`; `returns`
    instead of `value`; `zero` instead of
    `opt.zero_grad()`; `buffers`, the policies; `objects`, a dict of metrics, which `evaluate` updates, a
    statement with `batch`, its `scores` and `metrics`.

    Of plain PyTorch alone: `by_hand`, a statement behind the step with `model`; `collator`, which function of
    `head` makes its batches; `item(epoch, number)`, the row that is record `number` of the dataset.
    """

    name: str
    names: tuple[str, ...] = ()
    async_names: tuple[str, ...] = ()
    loop_names: tuple[str, ...] = ()
    head: str = ""
    init: str = ""
    forward: str = ""
    build: str = ""
    prepared: str = ""
    optimizer: str = ""
    scheduler: str = ""
    loss: str = ""
    returns: str = ""
    collate: str = ""
    loader: str = ""
    zero: str = ""
    top: str = ""
    between: str = ""
    after: str = ""
    buffers: str = ""
    objects: str = ""
    evaluate: str = ""
    by_hand: str = ""
    collator: str = ""
    item: Callable[[int, int], int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    # the model's modes are others before or after it: with a second such one plain PyTorch has others in the
    # next step
    modes: bool = False
    streams: bool = False  # `loader` reads a dataset that can only be iterated
    alone: bool = False  # it does not go with others
    rounds: bool = False  # documented: the same arithmetic, with other roundings

    @property
    def in_loops_only(self) -> bool:
        return bool(self.zero or self.top or self.between or self.after)

    @property
    def is_single(self) -> bool:
        """A refused script tells nothing about the other mutations in it."""
        return bool(self.names) or self.alone


ONE_OF_A_KIND = (
    *("optimizer", "scheduler", "returns", "collate", "loader", "zero", "settings", "modes"),
    *("buffers", "objects", "by_hand"),
)


def fit(one: Mutation, other: Mutation) -> bool:
    """Whether both can be in one script."""
    return not any(getattr(one, part) and getattr(other, part) for part in ONE_OF_A_KIND)


def waits(code: str) -> str:
    """`code` at one step alone."""
    return f"if step == {STEP}:\n" + "\n".join(f"    {line}" for line in code.strip().splitlines())
