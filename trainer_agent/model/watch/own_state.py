"""State that a script keeps for itself: random generators of its own, counters, queues. Each process of a job
has its own copy of it, and nobody carries it from one to another, so what is computed with it would depend on
who computes which minibatch.

    first records, first minibatch ─► once ─► Snapshot
                                   ─► again, from the same parameters and seeds ─► Snapshot
    results differ, or a generator is elsewhere: refused by name
    only a number has changed, or a module beside the model: told

A generator that the script seeds again before each use is in the same place after both, and is no state.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trireme_shared.datasets.user_modules import is_below, made_objects

MOST_OBJECTS = 20_000
MOST_ITEMS = 1_000  # of one container
MOST_BYTES = 1 << 20  # of one array
DEPTH = 8
SHOWN = 3
WATCHED = 3  # minibatches
OF_A_JOB = (
    "each trainer of a job has its own copy, so results depend on which one computes what, unless it "
    "is seeded anew before each use (docs/script.md)"
)
BESIDE = (
    "each minibatch changes {names} of a module beside the model: each trainer changes a copy of its own, "
    "which no other trainer gets and nobody saves; make the module a part of the model, averages of "
    "parameters by trireme.nn.Ema(module, decay) (docs/buffers.md)"
)
MOST_COMPARED = 1 << 32

GENERATOR_HINT = (
    "draw from the generators of torch, numpy or random, which are seeded for each minibatch, "
    "record and function of the script; or make a generator "
    "where it is used, out of them: numpy.random.default_rng(numpy.random.randint(2**31)). "
    "deterministic = false makes this a warning"
)
STATE_HINT = (
    "keep what training needs in a floating-point or int64 buffer of the model (register_buffer), "
    "which trainers share, and draw from the generators of "
    "torch, numpy or random, which are seeded. deterministic = false makes this a warning"
)

GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)
_OURS = "trireme_shared", "trainer_agent", "trireme", "master_service", "pserver_service"
_KNOWN = (
    *(f"{name}." for name in _OURS),
    "torch.amp.",
    "torch.cuda.",
    "torch.optim.",
)  # their state is told or carried elsewhere
_SIMPLE = int, float, complex, str, bytes, bool, type(None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Digests by name ("RNG of train.py", "noise.rng of the model"). `generators`: random generators;
    `values`: numbers, text, arrays, lengths, `beside`: those of them that are parameters and buffers of
    modules beside the model."""

    generators: Mapping[str, bytes]
    values: Mapping[str, bytes]
    beside: frozenset[str] = frozenset()

    def moved(self, later: Snapshot) -> list[str]:
        """The generators that are in another state `later`."""
        return [name for name, state in later.generators.items() if self.generators.get(name, state) != state]

    def changed(self, later: Snapshot) -> list[str]:
        """The values that are others `later`."""
        return [name for name, value in later.values.items() if self.values.get(name) != value]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem`: why the result depends on who computes what, and `hint`, what to do; "": it does not.
    `notice`: what the user should look at."""

    problem: str = ""
    hint: str = ""
    notice: str = ""


def judged(what: str, difference: str, before: Snapshot, after: Snapshot) -> Verdict:
    """`what` was computed twice from the same parameters, records and seeds; `difference`: between both
    results, "" if there is none. `before`, `after`: the state of the script before and after the second
    time."""
    generators, values = before.moved(after), before.changed(after)
    if generators:
        return Verdict(
            f"{_named(generators)}: a random generator of the script's own, from which {what} "
            "draws. Each process has its own copy of it, so the "
            "result would depend on which trainer computes "
            f"what{f'; computed twice, {difference}' if difference else ''}",
            hint=GENERATOR_HINT,
        )
    if difference:
        held = f"; state of its own that changed: {_named(values)}" if values else ""
        return Verdict(
            f"{what} is not a function of its records, the parameters and the seed: computed "
            f"twice, {difference}{held}. The result would depend on "
            "which trainer computes what",
            hint=STATE_HINT,
        )
    if values:
        return Verdict(
            notice=f"{what} changes {_named(values)}: each trainer has its own copy of it, so nothing "
            "that is trained may depend on it"
        )
    return Verdict()


def _named(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def difference_of(first: object, second: object, where: str = "") -> str:
    """The first place in which two values of the same kind differ by a bit, as text; "" if there is none, or
    if they cannot be compared."""
    match first, second:
        case (Mapping(), Mapping()):
            found = (
                difference_of(first[key], second[key], f"{where}[{key!r}]") for key in first if key in second
            )
            return next(filter(None, found), "")
        case (list() | tuple(), list() | tuple()):
            found = (
                difference_of(*both, f"{where}[{number}]")
                for number, both in enumerate(zip(first, second, strict=False))
            )
            return next(filter(None, found), "")
        case (torch.Tensor() | np.ndarray(), torch.Tensor() | np.ndarray()):
            return (
                "" if _digest(first, MOST_COMPARED) == _digest(second, MOST_COMPARED) else f"{where} differs"
            )
        case (int() | float() | str() | bytes(), int() | float() | str() | bytes()):
            return "" if repr(first) == repr(second) else f"{where} was {first!r:.60} and then {second!r:.60}"
    return ""


def snapshot(script: Path, roots: Mapping[str, object]) -> Snapshot:
    """What can be reached from the modules of the script's folder, from what its frames hold, and from
    `roots` (by what messages call them)."""
    walk = _Walk(script.parent, [root for root in roots.values() if isinstance(root, nn.Module)])
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and (file := _file_below(module, script.parent)):
            walk.add(vars(module), f" of {file}")
    # a loop of the script's own has its state in its frames
    for number, frame in sys._current_frames().items():  # noqa: SLF001
        if number != threading.get_ident():
            walk.add_frames(frame)
    for name, root in roots.items():
        walk.add(root, f" of {name}")
    return walk.done()


class Watch:
    """Generators of the script's own, and modules beside the model, that change with each of its first
    minibatches, where nothing is computed twice: in a trainer, and in the user's own process. They are told,
    not refused: a generator that is seeded anew before each use moves, too."""

    def __init__(self, script: Path, model: nn.Module) -> None:
        self._script, self._model = script, model
        self._seen: list[Snapshot] = []

    def after_minibatch(self) -> str:
        """A sentence for the user, "" if there is nothing to tell."""
        if len(self._seen) == WATCHED:
            return ""
        self._seen.append(snapshot(self._script, {"the model": self._model, **made_objects()}))
        if len(self._seen) < WATCHED:
            return ""
        before, between, after = self._seen
        moved = [name for name in before.moved(between) if name in between.moved(after)]
        changed = {*before.changed(between)} & {*between.changed(after)} & before.beside
        told = (
            f"{_named(moved)} is a random generator of the script's own; {OF_A_JOB}" if moved else "",
            BESIDE.format(names=_named(sorted(changed))) if changed else "",
        )
        return "\n".join(filter(None, told))


def _file_below(module: types.ModuleType, folder: Path) -> str:
    """The name of its file, if that is the user's. Thousands of modules are asked, so text is compared first:
    a Path takes ten times as long."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.startswith(str(folder)):
        return ""
    path = Path(file)
    ours = module.__name__.partition(".")[0] in _OURS
    return path.name if not ours and is_below(path, folder) else ""


class _Walk:
    """Breadth first, so that an object is called by its shortest name. `models`: their parameters and buffers
    are shared, or compared (unshared_state.py)."""

    def __init__(self, folder: Path, models: list[nn.Module]) -> None:
        self._folder, self._beside = folder, set[str]()
        self._model = {id(part) for model in models for part in model.modules()}
        self._shared = {id(own) for model in models for own in (*model.parameters(), *model.buffers())}
        # those are seeded
        self._seen: set[int] = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}  # noqa: SLF001
        self._todo: deque[tuple[str, str, object, int]] = deque()
        self._generators: dict[str, bytes] = {}
        self._values: dict[str, bytes] = {}

    def add(self, root: object, of: str) -> None:
        self._todo.append(("", of, root, 0))

    def add_frames(self, frame: types.FrameType | None) -> None:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(self._folder) and frame.f_code.co_name != "<module>":
                self.add(dict(frame.f_locals), f" in {frame.f_code.co_name} of {path.name}")
            frame = frame.f_back

    def done(self) -> Snapshot:
        while self._todo and len(self._seen) < MOST_OBJECTS:
            name, of, value, depth = self._todo.popleft()
            if isinstance(value, _SIMPLE):
                shown = (len(value), value[:64]) if isinstance(value, str | bytes) else value
                self._values[f"{name}{of}"] = repr(shown).encode()
            elif id(value) not in self._seen:
                self._seen.add(id(value))
                self._look(name, of, value, depth)
        return Snapshot(self._generators, self._values, frozenset(self._beside))

    def _look(self, name: str, of: str, value: object, depth: int) -> None:
        if type(value).__module__.startswith(_KNOWN):
            return
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):
                self._generators[f"{name}{of}"] = _digest(_state_of(value))
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._values[f"{name}{of}"] = _digest(value)
        elif depth < DEPTH:
            if isinstance(value, list | deque | dict | set):
                self._values[f"{name or 'the names'}{of}"] = str(len(value)).encode()
            if isinstance(value, nn.Module) and id(value) not in self._model:
                self._add_tensors(name, of, value, depth)
            for part, inner in self._parts(value):
                self._todo.append((f"{name}{part}" if name else part.lstrip("."), of, inner, depth + 1))

    def _add_tensors(self, name: str, of: str, module: nn.Module, depth: int) -> None:
        """Of a module beside the model, but for those that the model has, too."""
        owned = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        for own, tensor in owned:
            if id(tensor) not in self._shared and not nn.parameter.is_lazy(tensor):
                path = f"{name}.{own}".lstrip(".")
                self._beside.add(f"{path}{of}")
                self._todo.append((path, of, tensor, depth + 1))

    def _parts(self, value: object) -> Iterator[tuple[str, object]]:
        match value:
            case dict():
                for number, (key, inner) in enumerate(value.items()):
                    if number == MOST_ITEMS:
                        return
                    yield (
                        (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.40}]"),
                        inner,
                    )
            case list() | tuple() | deque():
                for number, inner in enumerate(value):
                    if number == MOST_ITEMS:
                        return
                    yield f"[{number}]", inner
            case partial():
                yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
            case types.FunctionType():
                cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                yield from ((f"() {name}", cell.cell_contents) for name, cell in cells if _is_full(cell))
                yield "()", value.__defaults__
            case types.MethodType():
                yield "", value.__self__
            case types.GeneratorType():
                yield "", dict(value.gi_frame.f_locals) if value.gi_frame is not None else None
            case type():
                if value.__module__ in sys.modules and _file_below(
                    sys.modules[value.__module__], self._folder
                ):
                    yield (
                        "",
                        {name: inner for name, inner in vars(value).items() if not name.startswith("__")},
                    )
            case types.ModuleType() | torch.dtype() | torch.device() | torch.optim.Optimizer():
                return
            case nn.Module():
                own = {name: inner for name, inner in vars(value).items() if name not in _OF_TORCH}
                yield from ((f".{name}", inner) for name, inner in (*own.items(), *value.named_children()))
            case _:
                if isinstance(found := getattr(value, "__dict__", None), dict):
                    yield from ((f".{name}", inner) for name, inner in found.items())


# shared, or compared (unshared_state.py)
_OF_TORCH = frozenset(("training", "_parameters", "_buffers", "_modules"))


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _state_of(generator: object) -> object:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case np.random.BitGenerator():
            return generator.state
        case _:
            assert isinstance(generator, random.Random)
            return generator.getstate()


def _digest(value: object, most: int = MOST_BYTES) -> bytes:
    """Of arrays above `most` bytes only the shape, and how often torch wrote to them."""
    match value:
        case Mapping():
            return b"".join(_digest(inner) for inner in value.values())
        case torch.Tensor():
            known = f"{value.dtype} {tuple(value.shape)}".encode()
            if value.nbytes > most or value.is_meta or value.layout != torch.strided:
                return known + str(value._version).encode()  # noqa: SLF001  torch has no public name for it
            flat = value.detach().cpu().contiguous().reshape(-1)
            return hashlib.sha256(
                known + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
            ).digest()
        case np.ndarray():
            known = f"{value.dtype} {value.shape}".encode()
            if value.nbytes > most or value.dtype.hasobject:
                return known
            return hashlib.sha256(known + np.ascontiguousarray(value).tobytes()).digest()
        case _:
            return hashlib.sha256(repr(value).encode()).digest()
