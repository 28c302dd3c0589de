"""Rows lookup, step and small: ways take turns, round by round, on the same minibatches; then everybody's
rows are compared."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.baselines import Remote
from benchmarks.dense_trireme import PserverProcess
from benchmarks.measurements import p99_and_max
from benchmarks.tables.lines import Figure, Line, exactly, figure
from benchmarks.tables.minibatches import LR, SMALL, Minibatches
from benchmarks.tables.peers import SAME, Paddle, Peer, PeerError, Tfra
from benchmarks.tables.ways import Server, Torch, Way, table_spec

WARM_UP = 3
SMALL_IN_ROUND = 120
GOALS = {"lookup": {"shm": 10.0, "tcp": 6.0}, "step": {"shm": 5.0, "tcp": 3.0}, "small": {}}
SMALL_GOAL_MS = 1.0
PEERS = ("Paddle", "TFRA", "torch")
IN_PROCESS = (
    "TFRA and torch work in the process that asks, without a server; torch is told the rows' numbers "
    "instead of ids; Paddle's steps end when they are sent"
)


@dataclass(frozen=True)
class Sizes:
    rows: int
    dim: int
    ids: int
    rounds: int
    steps: int
    transports: tuple[str, ...]
    peers: tuple[str, ...]
    bind: bool


@dataclass
class Measured:
    """Of one way: million ids a second of each round; milliseconds of small lookups, and of ours without
    ids."""

    lookup: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    small: list[float] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)


def measure(sizes: Sizes, wanted: Sequence[str]) -> list[Line]:
    """Lines of those rows that are wanted. Raises AssertionError if ways of ours disagree with torch."""
    every = sorted(os.sched_getaffinity(0))
    servers, clients = ({every[0]}, {every[-1]}) if sizes.bind else (set(every), set(every))
    data, missing = Minibatches(sizes.rows, sizes.dim, sizes.ids), {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.sched_setaffinity(0, clients)
        stack.callback(os.sched_setaffinity, 0, set(every))
        ways: list[Way] = [Torch(data)] if "torch" in sizes.peers else []
        ways += [_server(kind, data, folder, servers, stack) for kind in sizes.transports]
        initial = folder / "initial.npy"
        np.save(initial, _initial(data))
        for name in ("TFRA", "Paddle"):
            if name in sizes.peers:
                try:
                    ways.append(_peer(name, data, folder, initial, servers, clients, stack))
                except PeerError as error:
                    missing[name] = str(error)
        measured = _rounds(ways, sizes, wanted, missing)
        _compare(ways, sizes.rounds * sizes.steps, "step" in wanted, missing)
        how = {way.name: way.how for way in ways if isinstance(way, Peer)}
        lines = [line for row in wanted for line in _lines(row, sizes, measured, missing, how)]
        distinct = len(np.unique(data.of(0)))
        said = [
            f"{data.rows:,} rows of {sizes.dim}, {sizes.ids:,} ids a minibatch, of which {distinct:,} differ",
            IN_PROCESS,
        ]
        said += [
            f"Paddle's server has {way.bytes_a_row:.0f} bytes a row"
            for way in ways
            if isinstance(way, Paddle)
        ]
        lines[0].note = "; ".join([*said, lines[0].note] if lines[0].note else said)
        return lines


def _initial(data: Minibatches) -> np.ndarray:
    from trireme_shared.tables.table import initial_values

    return initial_values(table_spec(data.dim), data.all)


def _server(kind: str, data: Minibatches, folder: Path, cores: set[int], stack: ExitStack) -> Server:
    uds = str(folder / kind)
    before, Remote.cores = Remote.cores, itertools.repeat(cores)
    process = Remote(PserverProcess, 0, f"{uds}-0")
    Remote.cores = before
    stack.callback(process.close)
    server = Server(kind, data, process.ask("start"), uds)
    stack.callback(server.close)
    server.begin()
    return server


def _peer(
    name: str,
    data: Minibatches,
    folder: Path,
    initial: Path,
    servers: set[int],
    clients: set[int],
    stack: ExitStack,
) -> Peer:
    """Raises PeerError."""
    peer = Tfra(folder, clients) if name == "TFRA" else Paddle(data.dim, folder, servers, clients)
    stack.callback(peer.close)
    peer.setup(data, initial)
    return peer


def _rounds(
    ways: list[Way], sizes: Sizes, wanted: Sequence[str], missing: dict[str, str]
) -> dict[str, Measured]:
    found = {way.name: Measured() for way in ways}
    for number in range(-WARM_UP, sizes.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            if way.name in missing:
                continue
            try:
                one = _round(way, number, sizes, wanted)
            except PeerError as error:
                missing[way.name] = str(error)
                continue
            if number >= 0:
                found[way.name].lookup += one.lookup
                found[way.name].step += one.step
                found[way.name].small += one.small
                found[way.name].empty += one.empty
        print(f"tables: round {number + 1} of {sizes.rounds}", file=sys.stderr)
    return found


def _round(way: Way, number: int, sizes: Sizes, wanted: Sequence[str]) -> Measured:
    """Without a warm-up's updates: those of minibatches that are timed alone are made."""
    found = Measured()
    if "lookup" in wanted:
        found.lookup.append(sizes.ids / way.lookup(number) / 1e6)
    if "step" in wanted and number >= 0:
        numbers = range(number * sizes.steps, (number + 1) * sizes.steps)
        found.step.append(sizes.steps * sizes.ids / way.steps(numbers) / 1e6)
    if "small" in wanted:
        found.small += [1e3 * way.small(100 * number + k) for k in range(SMALL_IN_ROUND)]
        if isinstance(way, Server):
            found.empty += [1e3 * way.empty() for _ in range(SMALL_IN_ROUND)]
    return found


def _compare(ways: list[Way], number: int, stepped: bool, missing: dict[str, str]) -> None:
    """All ways have the rows of torch, ours to the bit. Raises AssertionError; peers that differ are missing,
    with the reason."""
    torch = next((way for way in ways if isinstance(way, Torch)), None)
    for way in ways:
        if way.name in missing or torch is None or way is torch:
            continue
        if isinstance(way, Paddle):
            try:
                way.check()
            except PeerError as error:
                missing[way.name] = str(error)
            continue
        for which in (0, number):
            expected, found = torch.found(which), way.found(which)
            if isinstance(way, Server):
                assert np.array_equal(expected, found), f"{way.name}: rows have not torch's bits"
            elif not np.allclose(expected, found, rtol=0, atol=SAME * LR if stepped else 0):
                missing[way.name] = f"rows differ from torch's by {np.abs(expected - found).max():.2g}"


def _lines(
    row: str,
    sizes: Sizes,
    measured: dict[str, Measured],
    missing: dict[str, str],
    how: dict[str, dict[str, str]],
) -> list[Line]:
    def of(name: str) -> Figure | str:
        if name in missing:
            return missing[name]
        values = getattr(measured[name], row)
        return exactly(p99_and_max(values)[0]) if row == "small" else figure(values)

    peers = {name: of(name) for name in PEERS if name in sizes.peers}
    work = {"lookup": "lookup", "step": "lookup + Adam step", "small": f"{SMALL:,} keys, p99"}[row]
    forms = ", ".join(
        f"{name} {said[row]}" for name, said in how.items() if row in said and name not in missing
    )
    note = f"fastest forms: {forms}" if forms else ""
    lines = []
    for kind in sizes.transports:
        common = {"row": row, "work": f"{work}, {kind}", "ours": of(kind), "peers": peers}
        if row == "small":
            lines.append(
                Line(**common, unit="ms", goal=SMALL_GOAL_MS, higher=False, note=_small_note(measured[kind]))
            )
        else:
            lines.append(Line(**common, unit="M ids/s", goal=GOALS[row].get(kind)))
    if lines:
        lines[0].note = "; ".join(filter(None, [note, lines[0].note]))
    return lines


def _small_note(found: Measured) -> str:
    """What of the time is the way there and back: lookups without any id."""
    return (
        f"median {median(found.small):.2f} ms; without ids: median {median(found.empty):.2f}, p99 "
        f"{p99_and_max(found.empty)[0]:.2f} ms"
    )
