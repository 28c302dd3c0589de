"""The dtype of a column of numbers that are written as text, or are Python's own: one rule for all readers.

    true, false                ─► bool
    whole numbers              ─► int64; uint64 if one of them is 2**63 or more
    numbers with a fraction    ─► float32; float64 if one is above 2**24 and float32 would lose digits of it

What fits into none of them without losing a digit is refused. Arrays keep their own dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DType = np.dtype[Any]
BOOL, INT64, UINT64, FLOAT32, FLOAT64 = map(np.dtype, ("bool", "int64", "uint64", "float32", "float64"))
NUMBERS = "biuf"
_SCALARS, _LISTS = {bool, int, float}, {list, tuple}
_EXACT32, _EXACT64 = float(1 << 24), float(1 << 53)


class Misfit(ValueError):
    """`value`, number `number` of a column, cannot be held by `dtype` (None: by none of the rule's) without
    loss."""

    def __init__(self, value: Any, dtype: DType | None, number: int = 0, why: str = "") -> None:
        super().__init__(why or f"{shown(value)} does not fit {dtype}")
        self.value, self.dtype, self.number = value, dtype, number


def shown(value: Any) -> str:
    """A value for a message: with all its digits, but no more than 60 characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_python(value: Any) -> bool:
    """Whether a value is a number of Python, or a list of them: it has no dtype of its own."""
    return isinstance(value, bool | int | float | list | tuple) and not isinstance(value, np.generic)


def without_objects(values: Sequence[Any]) -> list[Any]:
    """Arrays of Python objects as lists: their numbers are Python's."""
    if np.ndarray not in set(map(type, values)):
        return list(values)
    return [
        value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
        for value in values
    ]


def dtype_of_numbers(numbers: Iterable[bool | float]) -> DType:
    """The dtype of a column with these Python numbers. Raises Misfit."""
    values = list(numbers)
    kinds = {float if isinstance(value, float) else type(value) for value in values}
    if kinds == {bool}:
        return BOOL
    if float in kinds:
        return _float_for(values)
    least, most = min(values), max(values)
    if most < 1 << 63:
        return INT64
    if least < 0:
        why = f"{most} needs uint64, and {least} is negative"
        raise Misfit(most, None, values.index(most), why)
    return UINT64


def common_dtype(values: Sequence[Any]) -> DType | None:
    """The dtype of a column with these values, arrays among them. None: not all of them are numbers. Raises
    Misfit; what a value's `__array__` raises."""
    values = without_objects(values)
    if set(map(type, values)) <= _SCALARS:
        return dtype_of_numbers(values)
    own = {np.asarray(value).dtype: number for number, value in enumerate(values) if not is_python(value)}
    if any(dtype.kind not in NUMBERS for dtype in own):
        return None
    if not own:
        return dtype_of_values(values)
    whole = np.result_type(*own)
    if len(own) > 1 and not all(
        np.can_cast(dtype, whole, "safe") and (dtype.kind == "f") == (whole.kind == "f") for dtype in own
    ):
        number = max(own.values())
        why = f"{' and '.join(sorted(map(str, own)))} stand in one column"
        raise Misfit(values[number], None, number, why)
    return whole


def dtype_of_values(values: Iterable[Any]) -> DType | None:
    """As `dtype_of_numbers`, of Python numbers and lists of them. None: there is something else among
    them."""
    numbers: list[bool | float] = []
    for value in values:
        if isinstance(value, bool | int | float):
            numbers.append(value)
            continue
        array = _array(value)
        if array is None:
            return None
        if array.dtype.kind in "bi" and array.size:
            numbers += [bool(array.flat[0])] if array.dtype == BOOL else [int(array.min()), int(array.max())]
        elif array.dtype.kind == "f" and _magnitude(array) < _EXACT32:
            numbers.append(0.5)
        else:
            numbers += _flat(value)
    if not numbers:
        return FLOAT32
    return dtype_of_numbers(numbers)


def fitted(value: Any, dtype: DType) -> npt.NDArray[Any]:
    """A number, or an array or list of numbers, with this dtype and all its digits: whole numbers stay the
    same, and fractions are rounded as the dtype rounds them. Raises Misfit, TypeError, ValueError."""
    if isinstance(value, np.ndarray | np.generic) or not is_python(value):
        array = np.asarray(value)
        if array.dtype == dtype or np.can_cast(array.dtype, dtype, "safe"):
            return array.astype(dtype, copy=False)
        raise Misfit(value, dtype, why=f"{array.dtype} does not fit {dtype}")
    made = _array(value)
    if made is None:
        raise Misfit(value, dtype)
    array = made
    if array.dtype.kind in "fO" and (
        dtype.kind != "f" or array.dtype == object or _magnitude(array) >= _EXACT32
    ):
        return _fitted_one_by_one(value, dtype)
    if array.dtype.kind in "iu":
        return _whole(array, value, dtype)
    if array.dtype == BOOL and dtype != BOOL:
        return array.astype(dtype)
    if array.dtype.kind == "f" or dtype == BOOL == array.dtype:
        return array.astype(dtype, copy=False)
    raise Misfit(value, dtype)


def column_of(values: list[Any], dtype: DType) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
    """All values with this dtype: one array, or a list of arrays if their shapes differ. Raises Misfit with
    the value's number."""
    values = without_objects(values)
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return fitted(values, dtype)
    if kinds <= _LISTS:
        with contextlib.suppress(Misfit):  # ragged, or a value does not fit: then it is looked for
            return fitted(values, dtype)
    arrays = []
    for number, value in enumerate(values):
        try:
            arrays.append(fitted(value, dtype))
        except Misfit as error:
            raise Misfit(error.value, dtype, number, str(error)) from error
    alike = all(array.shape == arrays[0].shape for array in arrays)
    return np.stack(arrays) if alike else arrays


def digits_lost(value: float) -> bool:
    """Whether float32 loses digits of a number that is above 2**24: its shortest decimal becomes another
    one."""
    if abs(value) < _EXACT32 or not np.isfinite(value):
        return False
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) != value


def check_float32(values: npt.NDArray[np.float64]) -> None:
    """Raises Misfit for the first whole number that float32 would change."""
    suspicious = np.flatnonzero(
        (np.abs(values) >= _EXACT32) & np.isfinite(values) & (values == np.floor(values))
    )
    for number in suspicious:
        if digits_lost(float(values[number])):
            raise Misfit(float(values[number]), FLOAT32, int(number))


def _float_for(values: list[bool | float]) -> DType:
    for number, value in enumerate(values):
        if (
            isinstance(value, int)
            and abs(value) >= _EXACT64
            and (value >> 1024 or int(float(value)) != value)
        ):
            why = f"{value} stands beside numbers with a fraction, and no float keeps all its digits"
            raise Misfit(value, None, number, why)
    return FLOAT64 if any(digits_lost(float(value)) for value in values) else FLOAT32


def _whole(array: npt.NDArray[Any], value: Any, dtype: DType) -> npt.NDArray[Any]:
    """Python's whole numbers, which numpy holds as int64 or uint64, as another dtype."""
    if dtype == array.dtype:
        return array
    if dtype.kind == "b":
        raise Misfit(value, dtype)
    changed = array.astype(dtype)
    back = (
        changed.astype(object)
        if changed.dtype.kind in "iu"
        else np.array([int(x) for x in changed.flat], dtype=object)
    )
    wrong = np.flatnonzero(back.ravel() != array.astype(object).ravel())
    if len(wrong):
        raise Misfit(int(array.flat[wrong[0]]), dtype, int(wrong[0]) if array.ndim == 1 else 0)
    return changed


def _fitted_one_by_one(value: Any, dtype: DType) -> npt.NDArray[Any]:
    """Floats where no float is wanted, or numbers that numpy has rounded to floats, or large ones."""
    numbers = list(_flat(value))
    for number, each in enumerate(numbers):
        if isinstance(each, float):
            bad = dtype.kind != "f" or (dtype == FLOAT32 and each == np.floor(each) and digits_lost(each))
        else:
            kept = _kept(int(each), dtype)
            bad = kept != each
        if bad:
            raise Misfit(each, dtype, number)
    return np.array(value, dtype=dtype)


def _kept(whole: int, dtype: DType) -> int | None:
    """A whole number as the dtype holds it; None if it cannot."""
    try:
        return int(np.array(whole, dtype=dtype))
    except (OverflowError, ValueError):
        return None


def _array(value: Any) -> npt.NDArray[Any] | None:
    """None: not numbers, or ragged."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return None
    if array.dtype == object:
        return array if all(isinstance(each, bool | int | float) for each in _flat(value)) else None
    return array if array.dtype.kind in NUMBERS else None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value.item() if isinstance(value, np.generic) else value


def _magnitude(array: npt.NDArray[Any]) -> float:
    """The largest absolute value that is finite."""
    finite = np.abs(array[np.isfinite(array)]) if array.size else array
    return float(finite.max()) if finite.size else 0.0
