"""What a user says of a table: its optimizer, how its rows begin, and the other settings, checked."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.records.record import Record

R = TypeVar("R", bound=Record)
INIT = re.compile(r"(uniform|normal|constant)\(\s*([-+0-9.eE]+)\s*\)")


def SGD(lr: float, *, follow_schedule: bool = False) -> RowOptimizer:  # noqa: N802  as in torch.optim
    """As torch.optim.SGD without momentum: no state. `follow_schedule`: what the script's scheduler does to the learning rate of the first parameter group,
    by a factor, it does to `lr` too. Raises InvalidArgument."""
    return _record(RowOptimizer, "SGD", {"kind": "sgd", "lr": lr, "follow_schedule": follow_schedule})


def Adagrad(  # noqa: N802
    lr: float,
    *,
    eps: float = 1e-10,
    initial_accumulator_value: float = 0.0,
    per_row: bool = False,
    follow_schedule: bool = False,
) -> RowOptimizer:
    """As torch.optim.Adagrad. `per_row`: one number of state a row, which grows by the mean of the squares, instead of one a column.
    `follow_schedule`: see SGD. Raises InvalidArgument."""
    more = {"eps": eps, "initial_accumulator_value": initial_accumulator_value, "per_row": per_row}
    return _record(RowOptimizer, "Adagrad", {"kind": "adagrad", "lr": lr, "follow_schedule": follow_schedule, **more})


def Adam(  # noqa: N802
    lr: float = 0.001,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    follow_schedule: bool = False,
) -> RowOptimizer:
    """As torch.optim.SparseAdam: rows without a gradient stay as they are. `follow_schedule`: see SGD. Raises InvalidArgument."""
    more = {"betas": betas, "eps": eps, "follow_schedule": follow_schedule}
    return _record(RowOptimizer, "Adam", {"kind": "adam", "lr": lr, **more})


def Ftrl(  # noqa: N802
    lr: float, *, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0, initial_accumulator_value: float = 0.0
) -> RowOptimizer:
    """FTRL-proximal (McMahan et al. 2013): with `l1` > 0 numbers that matter little are exactly 0. Its learning rate follows no schedule: a row is
    computed anew from sums that were made with one. Raises InvalidArgument."""
    more = {"l1": l1, "l2": l2, "beta": beta, "initial_accumulator_value": initial_accumulator_value}
    return _record(RowOptimizer, "Ftrl", {"kind": "ftrl", "lr": lr, **more})


def init_of(init: str | RowInit) -> RowInit:
    """Of "uniform(0.01)", "normal(0.01)", "constant(0.5)" or "zeros". Raises InvalidArgument."""
    if isinstance(init, RowInit):
        return init
    text: object = init
    found = INIT.fullmatch(text.strip()) if isinstance(text, str) else None
    if text == "zeros":
        return RowInit(kind="constant", scale=0.0)
    try:
        if found is not None:
            return RowInit(kind=found[1], scale=float(found[2]))
    except ValueError:
        pass
    raise InvalidArgument(
        f'init is {init!r:.80}; write "uniform(0.01)", "normal(0.01)", "constant(0.5)" or "zeros", with a finite number'
    )


def spec_of(name: str, dim: int, optimizer: Any, init: str | RowInit, **more: int | None) -> TableSpec:
    """Without the seed, which is the job's. Raises InvalidArgument."""
    if not isinstance(optimizer, RowOptimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        msg = f"table {name!r:.80} has the optimizer {got}; rows are stepped by trireme.nn.SGD, Adagrad, Adam or Ftrl, called with their lr"
        raise InvalidArgument(msg)
    given = {"name": name, "dim": dim, "optimizer": optimizer, "init": init_of(init), **more}
    return _record(TableSpec, f"table {name!r:.80}", given)


def _record(kind: type[R], what: str, values: dict[str, Any]) -> R:
    """Numbers only where numbers belong: no texts, no bools, no fractions of rows. Raises InvalidArgument."""
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))} is {problem['input']!r:.80}: {problem['msg']}"
            for problem in error.errors()
        )
        raise InvalidArgument(f"{what}: {problems}") from error
