"""Lanes and the canonical binary tree: the arithmetic that makes sums independent of which trainer computed
which part.

A node is (mean gradient, sample count) over an aligned interval of lanes [a, b): b - a is a power of two and
divides a. node[a,b) = combine(node[a,m), node[m,b)).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

Interval = tuple[int, int]
Array = TypeVar("Array", bound=Any)


def is_aligned(first: int, last: int) -> bool:
    """True if [first, last) is a node of the tree."""
    size = last - first
    return size > 0 and size & (size - 1) == 0 and first % size == 0


def aligned_intervals(first: int, last: int) -> list[Interval]:
    """The fewest tree nodes that cover [first, last), in order."""
    nodes: list[Interval] = []
    while first < last:
        size = 1
        while first % (2 * size) == 0 and first + 2 * size <= last:
            size *= 2
        nodes.append((first, first + size))
        first += size
    return nodes


def intervals(lanes: Iterable[int]) -> list[Interval]:
    """The fewest intervals [first, last) of these lanes, which ascend."""
    found: list[Interval] = []
    for lane in lanes:
        if found and found[-1][1] == lane:
            found[-1] = found[-1][0], lane + 1
        else:
            found.append((lane, lane + 1))
    return found


def gaps(nodes: Iterable[Interval], lanes: int) -> list[Interval]:
    """What disjoint `nodes` leave of [0, lanes)."""
    found, end = [], 0
    for first, last in sorted(nodes):
        if first > end:
            found.append((end, first))
        end = last
    return [*found, (end, lanes)] if end < lanes else found


def share_of(lanes: int, owners: int, place: int) -> Interval:
    """[first, last) of the owner at `place`, where `owners` share all lanes as evenly as they can."""
    share, extra = divmod(lanes, owners)
    return place * share + min(place, extra), (place + 1) * share + min(place + 1, extra)


def place_of(lanes: int, owners: int, lane: int) -> int:
    """Whose share `lane` is in."""
    share, extra = divmod(lanes, owners)
    longer = extra * (share + 1)
    return lane // (share + 1) if lane < longer else extra + (lane - longer) // share


def sibling(node: Interval) -> Interval:
    """The node that `node` is combined with."""
    first, last = node
    size = last - first
    return (last, last + size) if first % (2 * size) == 0 else (first - size, first)


def parent(node: Interval) -> Interval:
    first, last = node
    size = last - first
    return (first, last + size) if first % (2 * size) == 0 else (first - size, last)


def combine(left: Array, left_count: int, right: Array, right_count: int) -> tuple[Array, int]:
    """The mean over both halves, written **in place** into one of the two torch tensors, and its sample
    count.

    An empty side (count 0) leaves the other untouched; equal counts halve exactly; otherwise the weighted
    mean. Only sums and products are used, each rounded once, so that every device and every cut into blocks
    gives the same bits: to divide by a number, CUDA multiplies by the reciprocal and a CPU divides. Integer
    tensors are not averaged: the first lane that has data wins.
    """
    if right_count == 0:
        return left, left_count
    if left_count == 0:
        return right, right_count
    total = left_count + right_count
    if not left.is_floating_point():
        return left, total
    if left_count == right_count:
        return left.add_(right).mul_(0.5), total
    return left.mul_(left_count).add_(right.mul_(right_count)).mul_(1.0 / total), total


def step_seed(seed: int, step: int, lane: int) -> int:
    """Seed of the random numbers of one lane's forward pass (splitmix64 over the three numbers), in [0,
    2**63)."""
    value = seed & _MASK
    for part in (step, lane):
        value = _mix((value + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return value >> 1


_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
