"""The user's script as a plain module: loaded by path, its functions (hooks) checked, its errors turned into
UserCodeError.

    script.py ──load──► UserModule ──call("loss", model, batch)──► value
                                                               ──► UserCodeError (the user's frames)

A script that calls trireme.prepare has a loop of its own instead of functions: a LoopModule, which runs it in
a thread. Tracebacks are as users read them: the frames of their script and the innermost ones of libraries,
never ours.

Raises InvalidArgument for a script that lacks something, UserCodeError for what its code raises.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType, ModuleType, TracebackType
from typing import Any, cast, get_args

from trainer_agent.data import Blaming, open_dataset
from trainer_agent.data.iterables import described
from trainer_agent.data.loaders import (
    READS_BESIDE,
    UNCOUNTED,
    LoaderItems,
    is_loader,
    take_over,
    two_collates,
)
from trainer_agent.model.buffer_policies import Policy, checked
from trainer_agent.own_loop.accelerator import check_no_accelerator
from trainer_agent.own_loop.source import FromSource, has_own_loop, run_as_main
from trainer_agent.own_loop.turns import OwnLoop, Prepared, is_function
from trainer_agent.script.hub import unreached
from trainer_agent.script.lightning import PREFIX
from trireme_shared.datasets.iterables import Shards
from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.datasets.user_modules import enter, give, is_below, make
from trireme_shared.platform.membership.local_script import at_home
from trireme_shared.protocol.errors import InvalidArgument, TriremeError, UserCodeError, is_interrupt
from trireme_shared.protocol.records.datasets import Dataset, IterableStyle, MapStyle

DATASETS = get_args(get_args(Dataset)[0])
REQUIRED = {
    "model": "def model(): ... returning a torch.nn.Module",
    "dataset": "def dataset(): ... returning a trireme.data dataset",
    "loss": "def loss(model, batch): ... returning the mean loss of the minibatch",
    "optimizer": "def optimizer(model): ... returning an optimizer of torch.optim or trireme.optim",
}
CALLED = "trireme.lightning"
DATA = "dataset", "evaluation_dataset"
OPTIONAL = ("collate", "ids", "scheduler", "evaluation_dataset", "evaluate", "evaluation_metrics", "metrics")
ARGUMENTS = {"model": 0, "dataset": 0, "loss": 2, "optimizer": 1, "collate": 1, "ids": 1, "scheduler": 1}
ARGUMENTS |= {"evaluation_dataset": 0, "evaluate": 2, "evaluation_metrics": 0, "metrics": 1}
WITH_OBJECTS = "def evaluate(model, batch, metrics): ... which updates the objects of evaluation_metrics()"
ONE_RECORD = "Expected more than 1 value per channel when training"  # torch's words
LIMIT_HIT = "FailOnRecompileLimitHit"  # torch's class, of a module that most processes do not load
ALL_SHAPES = (
    "torch.compile has met more shapes of batches than it keeps kernels for, and which shapes have one would "
    "depend on which process computes what: give torch.compile(..., dynamic=True), or batches of fewer "
    "shapes; deterministic = false leaves all this to torch"
)
DROP_LAST = (
    "BatchNorm cannot train on a minibatch of one record, which the last one of a file may be; set "
    "drop_last=True, which leaves short "
    "minibatches out, or another global_batch_size or number of lanes"
)
LIBRARY_FRAMES = 3  # of a traceback
MOST_CAUSES = 4
BEGUN = "Traceback (most recent call last):\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_PACKAGES = Path(__file__).resolve().parents[2]
_loading: list[ModuleType] = []
_OURS = ("trireme_shared", "trainer_agent", "trireme")


class UserModule:
    """The hooks of one script. `call` runs a hook; `has` says whether an optional one exists."""

    loop: OwnLoop | None = None
    _loaders: dict[str, LoaderItems]
    _names: Mapping[str, str] = MappingProxyType({})  # what its functions are called in the script
    #: What the user should know of what can only be iterated, by hook.
    _iterables: dict[str, str]
    _DATASET = "{hook}() of {path} returned"

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path = path
        check_no_accelerator(str(path))
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._names = {name: _name_in(module, name) for name in (*REQUIRED, *OPTIONAL)}
        for name, shape in REQUIRED.items():
            if getattr(module, self._names[name], None) is None:
                hint = f"add {shape}, or train in a loop of your own with trireme.prepare"
                if not self._names[name].startswith(PREFIX) and CALLED in path.read_text(errors="replace"):
                    hint = (
                        f"call {CALLED} outside of functions and of the `__main__` part: trainers import it"
                    )
                raise InvalidArgument(f"{path} has no function {name!r}", hint=hint)
        for name in (*REQUIRED, *OPTIONAL):
            hook = getattr(module, self._names[name], None)
            if hook is not None and (name != "ids" or callable(hook)):  # scripts call other things ids
                takes_objects = name == "evaluate" and hasattr(module, self._names["evaluation_metrics"])
                self._hooks[name] = _checked(path, name, hook, takes_objects=takes_objects)
        if self.has("evaluation_metrics") and not self.has("evaluate"):
            raise InvalidArgument(
                f"{path} has evaluation_metrics() and no evaluate", hint=f"add {WITH_OBJECTS}"
            )
        self._config = _config(path, getattr(module, "config", None))
        self._loaders, self._iterables = {}, {}
        self._buffers = checked(getattr(module, "buffers", None), f"buffers in {path}")

    @property
    def config(self) -> dict[str, Any]:
        """The settings that the script gives, with those of a DataLoader that `dataset` has returned."""
        loader = self._loaders.get("dataset")
        return self._own_config() | (dict(loader.settings) if loader is not None else {})

    def _own_config(self) -> dict[str, Any]:
        return self._config

    @property
    def buffers(self) -> Mapping[str, Policy]:
        """What the script says of its model's buffers (see trainer_agent.model.buffer_policies)."""
        return self._buffers

    def __repr__(self) -> str:
        return f"<UserModule {self.path}: {', '.join(self._hooks)}>"

    def has(self, hook: str) -> bool:
        return hook in self._hooks

    def call(self, hook: str, *arguments: Any) -> Any:
        return self.guard(self._hooks[hook], *arguments)

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any:
        """Run the user's code, or code that may call it (backward, a scheduler's step). Whatever it raises is
        its error, SystemExit and KeyboardInterrupt too: only a real Ctrl-C ends this process."""
        try:
            return code(*arguments)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise self.error_of(error) from error

    def dataset(self, hook: str = "dataset", seed: int = 0) -> Dataset:
        """The dataset that `dataset()` or `evaluation_dataset()` describes. An object with a length, such as
        a `torch.utils.data.Dataset`, is described by the hook's own name: each trainer calls it. `seed`: of
        the job; every call of both functions, in any process, draws the same random numbers, so both can take
        parts of one random split."""
        found = self._made(hook, seed)
        if is_loader(found):
            return self._taken_over(found, hook, seed)
        if hasattr(found, "__len__") and not isinstance(found, str | bytes | Mapping):
            return self._described(found, hook)
        if hasattr(found, "__iter__") and not isinstance(found, (*DATASETS, str, bytes, Mapping)):
            return self._iterated(found, hook, seed)
        if not isinstance(found, DATASETS):
            raise InvalidArgument(
                f"{self._DATASET.format(hook=hook, path=self.path)} {type(found).__name__}, not a dataset",
                hint=_instead_of(found),
            )
        return cast("Dataset", found)

    def _made(self, hook: str, seed: int) -> Any:
        return self.guard(make, self._hooks[hook], seed)

    def reader_of(
        self, dataset: Dataset, seed: int, changed: Callable[[str], object] | None = None
    ) -> Blaming:
        """See open_dataset."""
        return open_dataset(dataset, seed, changed, named=not self.has("collate"))

    def _described(self, found: Any, hook: str) -> Dataset:
        """An object of the script by the name of the hook that makes it."""
        kind = MapStyle if _has_items(found) else IterableStyle
        return kind(reader=self._name_of(found, hook), records=self.guard(len, found))

    def _iterated(self, found: Any, hook: str, seed: int, *, loader: bool = False) -> Dataset:
        """What can only be iterated. `loader`: by a DataLoader."""
        name = self._name_of(found, hook)
        shards, sentence = self.guard(described, found, name)
        self._iterables[hook] = sentence
        return self._counted(IterableStyle(reader=name, shards=shards, loader=loader), seed)

    def _counted(self, dataset: IterableStyle, seed: int) -> IterableStyle:  # noqa: ARG002
        """With its records, if nobody else can count them."""
        return dataset

    def _name_of(self, found: Any, hook: str) -> str:
        if not self.path.stem.isidentifier():
            msg = (
                f"{self._DATASET.format(hook=hook, path=self.path)} {type(found).__name__}, which trainers "
                "find by the module's name"
            )
            raise InvalidArgument(msg, hint=f"{self.path.stem!r} is no name of a module: rename the file")
        return f"{self.path.stem}:{self._names.get(hook, hook)}"

    def _taken_over(self, found: Any, hook: str, seed: int) -> Dataset:
        name = self._name_of(found, hook)
        taken = take_over(found, name, evaluates=hook == "evaluation_dataset")
        if taken.has_own_collate and self.has("collate"):
            raise two_collates(name)
        own = self._own_config()
        if taken.count == UNCOUNTED and "shuffle" in own:  # torch lets no such DataLoader shuffle
            kept = {name: value for name, value in taken.settings.items() if name != "shuffle"}
            taken = dataclasses.replace(taken, settings=kept)
        for setting, value in taken.settings.items() if hook == "dataset" else ():
            if own.get(setting) is not None and not _is_same(own[setting], value):
                msg = (
                    f"the config of {self.path} has {setting} = {own[setting]}, and the DataLoader of {name} "
                )
                raise InvalidArgument(f"{msg}says {value}", hint=f"leave {setting} out of the config")
        self._loaders[hook] = taken
        if taken.count == UNCOUNTED:
            return self._iterated(taken.items, hook, seed, loader=True)
        return MapStyle(reader=name, records=taken.count, loader=True)

    def taken_over(self, given: Mapping[str, Any]) -> list[str]:
        """What the user should know of the DataLoaders and iterables that `dataset` has returned, as
        sentences. `given`: settings that win over the script's."""
        told = list(self._iterables.values())
        for hook, taken in self._loaders.items():
            what = f"the DataLoader of {self.path.stem}:{hook}"
            if hook == "dataset":
                said = ", ".join(f"{name} = {value}" for name, value in taken.settings.items())
                told.append(f"{what} decides {said}")
                told += [
                    f"{name} = {given[name]} was given, and wins over {value}, which {what} says"
                    for name, value in taken.settings.items()
                    if name in given and not _is_same(given[name], value)
                ]
            else:
                size = taken.settings["global_batch_size"]
                told.append(
                    f"{what}: batch_size={size} is not used; minibatches of an evaluation have as many "
                    "records as those of a lane, which changes no sum over records"
                )
            if taken.unused:
                told.append(f"{what}: not used: {', '.join(taken.unused)}; {READS_BESIDE}")
        return told

    def error_of(self, error: BaseException, *, fatal: bool = False) -> UserCodeError:
        """`error` as UserCodeError, with the traceback cut down to the frames below the script's folder. If
        there are none, it has the innermost ones of libraries, never ours. `fatal`: see UserFailure."""
        fatal = fatal or (isinstance(error, TriremeError) and bool(error.details.get("fatal")))
        return _user_code_error(error, message_of(error), self.path.parent, fatal=fatal)


class LoopModule(UserModule):
    """A script with a loop of its own, as if it were functions: `call("loss", model, batch)` is one pass of
    its loop's body. `script` runs it, when it is first needed; None: it runs already, and has called
    trireme.prepare."""

    loop: OwnLoop
    _DATASET = "trireme.prepare in {path} got as {hook}"

    def __init__(
        self, path: Path, loop: OwnLoop | None = None, script: Callable[[], object] | None = None
    ) -> None:
        self.path, self.loop, self._script = path, loop or OwnLoop(self._ended_by), script
        self._loaders, self._iterables, self._gave = {}, {}, False

    def __repr__(self) -> str:
        return f"<LoopModule {self.path}: {self.loop!r}>"

    def _own_config(self) -> dict[str, Any]:
        return _config(self.path, self._prepared().config)

    @property
    def buffers(self) -> Mapping[str, Policy]:
        return checked(self._prepared().buffers, f"buffers in {self.path}")

    def _made(self, hook: str, seed: int) -> Any:
        self._prepared()
        given = self._given(hook)
        makes = isinstance(given, type) or (callable(given) and not hasattr(given, "__len__"))
        return self.guard(make, given, seed) if makes else given

    def _given(self, hook: str) -> Any:
        prepared = self.loop.prepared
        return prepared.dataset if hook == "dataset" else prepared.hooks.get(hook)

    def _iterated(self, found: Any, hook: str, seed: int, *, loader: bool = False) -> Dataset:
        if isinstance(found, Iterator) and found is self._given(hook):
            msg = (
                f"{self._DATASET.format(hook=hook, path=self.path)} {type(found).__name__}, which can be "
                "iterated once only"
            )
            raise InvalidArgument(msg, hint="give a function that makes it anew: def data(): return ...")
        return super()._iterated(found, hook, seed, loader=loader)

    def _counted(self, dataset: IterableStyle, seed: int) -> IterableStyle:
        """Here, because the master cannot run a loop to get at the object."""
        shards = Shards(dataset, seed)
        counts = [sum(1 for _ in shards.records(name)) for name in dataset.shard_names]
        number, loader = dataset.shards, dataset.loader
        return IterableStyle(reader=dataset.reader, shards=number, loader=loader, shard_records=tuple(counts))

    def has(self, hook: str) -> bool:
        return hook in self._prepared().hooks

    def call(self, hook: str, *arguments: Any) -> Any:
        prepared = self._prepared()
        match hook:
            case "model" | "optimizer" | "dataset":
                return getattr(prepared, hook)
            case "loss":
                return self.loop.forward(arguments[1])
            case "scheduler" if not is_function(prepared.hooks[hook]):
                return prepared.hooks[hook]
            case "evaluation_dataset" if not callable(prepared.hooks[hook]):
                return prepared.hooks[hook]
        return self.guard(prepared.hooks[hook], *arguments)

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any:
        with self.loop.acting():
            return super().guard(code, *arguments)

    def _prepared(self) -> Prepared:
        if self._script is not None:
            self.loop.start(self._script)
        if not self._gave:  # readers find the objects by these names
            self._gave = True
            for hook in ("dataset", "evaluation_dataset"):
                if (found := self._given(hook)) is not None and not isinstance(found, DATASETS):
                    give(f"{self.path.stem}:{hook}", found)
        return self.loop.prepared

    def _ended_by(self, error: BaseException) -> UserCodeError:
        """In the middle of a loop nobody can go on: that ends the job."""
        return self.error_of(error, fatal=self.loop.is_prepared)


def load(script: str | Path) -> UserModule:
    """Run the script as a module (not as `__main__`), with its folder first on sys.path; one with a loop of
    its own not yet."""
    path = at_home(script).resolve()
    if not path.is_file():
        raise InvalidArgument(f"there is no script {path}", hint="give the path of a Python file")
    if path.suffix == ".py" and has_own_loop(path):
        return LoopModule(path, script=partial(run_as_main, path))
    name = (
        path.stem
        if path.stem not in sys.modules and path.stem.isidentifier()
        else f"trireme_script_{abs(hash(path))}"
    )
    spec = importlib.util.spec_from_file_location(name, path, loader=FromSource(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise InvalidArgument(f"{path} is not a Python file", hint="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    enter(path.parent).prepare(module)
    sys.modules[name] = module
    _loading.append(module)
    try:
        with seeded(START_SEED):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if is_interrupt(error):
            raise
        raise _user_code_error(error, str(error), path.parent, f"{path.name} cannot be loaded: ") from error
    finally:
        _loading.remove(module)
    return UserModule(path, module)


def _name_in(module: ModuleType, hook: str) -> str:
    """What a function is called in the script: trireme.lightning has put its own there. A dataset that it was
    not given may be the script's."""
    given = f"{PREFIX}{hook}"
    if not hasattr(module, f"{PREFIX}model") or hasattr(module, given):
        return given if hasattr(module, given) else hook
    return hook if hook in DATA and callable(getattr(module, hook, None)) else given


def is_loading(module: ModuleType) -> bool:
    """Whether `load` runs it just now: it is not the script of `python script.py`."""
    return module in _loading


def _instead_of(found: Any) -> str:
    """What to return instead of what is no dataset."""
    if isinstance(found, Mapping) and (name := next(iter(found), None)) is not None:
        return (
            f"it has several, {', '.join(map(str, found))}: return one of them, for example found[{name!r}]"
        )
    return 'return one of trireme.data, for example trireme.data.Parquet("train-*.parquet")'


def _is_same(given: object, value: object) -> bool:
    """Whether both say the same of a setting, one of them perhaps as text."""
    return str(given).lower() == str(value).lower()


def _has_items(found: Any) -> bool:
    """Whether `found[number]` means something: torch gives its iterable datasets a method that only
    raises."""
    method = getattr(type(found), "__getitem__", None)
    return method is not None and getattr(method, "__qualname__", "") != "Dataset.__getitem__"


def _checked(
    path: Path, name: str, hook: Callable[..., Any] | object, *, takes_objects: bool
) -> Callable[..., Any]:
    """`takes_objects`: it is `evaluate`, and gets the metric objects, too. Raises InvalidArgument."""
    count, shape = ARGUMENTS[name] + takes_objects, WITH_OBJECTS if takes_objects else REQUIRED.get(name, "")
    if not callable(hook):
        raise InvalidArgument(f"{name!r} in {path} is {type(hook).__name__}, not a function", hint=shape)
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return hook
    try:
        signature.bind(*range(count))
    except TypeError:
        raise InvalidArgument(
            f"{name}{signature} in {path} does not take {count} argument{'' if count == 1 else 's'}",
            hint=shape or f"define it with {count}",
        ) from None
    return hook


def _config(path: Path, config: Any) -> dict[str, Any]:
    """`config` as a plain dict of what it sets; a trireme.Config gives its own `to_dict`."""
    if config is None:
        return {}
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise InvalidArgument(
            f"config in {path} is {type(config).__name__}", hint="use trireme.Config(...) or a dict"
        )
    return dict(config)


def _user_code_error(
    error: BaseException, message: str, folder: Path, prefix: str = "", *, fatal: bool = False
) -> UserCodeError:
    told = unreached(error, folder)
    return UserCodeError(
        f"{prefix}{type(error).__name__}: {told or message}",
        error_type=type(error).__name__,
        error_message=told or message,
        traceback="" if told else traceback_of(error, folder),
        fatal=fatal,
    )


def message_of(error: BaseException) -> str:
    """What `error` says, with its hint if it is one of ours, or if a setting helps."""
    if isinstance(error, TriremeError) and error.hint:
        return f"{error.message}; {error.hint}"
    if isinstance(error, ValueError) and ONE_RECORD in str(error):
        return f"{error}; {DROP_LAST}"
    if type(error).__name__ == LIMIT_HIT:
        return ALL_SHAPES
    return str(error)


def traceback_of(error: BaseException, folder: Path) -> str:
    """The traceback of `error`, cut down to the frames below `folder`, the script's, and the innermost ones
    of libraries that the last of them has called: LIBRARY_FRAMES. What the script raised `error` from comes
    first."""
    return "".join(_trimmed(error, folder))


def _trimmed(error: BaseException, folder: Path) -> list[str]:
    chain = [error]
    while (cause := chain[0].__cause__) is not None and len(chain) < MOST_CAUSES:
        chain.insert(0, cause)
    causes = [part for each in chain[:-1] if (part := _trimmed_one(each, folder))[:1] == [BEGUN]]
    return [line for part in causes for line in [*part, CAUSED]] + _trimmed_one(error, folder)


def _trimmed_one(error: BaseException, folder: Path) -> list[str]:
    frames = [
        frame
        for frame in traceback.extract_tb(_first_frame_below(error.__traceback__, folder))
        if not _is_of_trireme(frame.filename)
    ]
    users = [frame for frame in frames if is_below(Path(frame.filename), folder)]
    libraries = list(takewhile(lambda frame: frame not in users, reversed(frames)))[::-1] if users else frames
    lines = traceback.format_exception_only(type(error), error)
    if type(error).__module__.partition(".")[0] in _OURS:
        lines = [f"{type(error).__name__}: {message_of(error)}\n"]
    # the message of a SyntaxError has the place
    if not frames or (isinstance(error, SyntaxError) and not users):
        return lines
    told = libraries[-LIBRARY_FRAMES:]
    left_out = len(libraries) - len(told)
    between = [f"  ... {left_out} frame{'s' * (left_out > 1)} of libraries\n"] if left_out else []
    return [BEGUN, *traceback.format_list(users), *between, *traceback.format_list(told), *lines]


def _first_frame_below(trace: TracebackType | None, folder: Path) -> TracebackType | None:
    walk = trace
    while walk is not None and not is_below(Path(walk.tb_frame.f_code.co_filename), folder):
        walk = walk.tb_next
    return walk if walk is not None else trace


def _is_of_trireme(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGES) and path.relative_to(_PACKAGES).parts[0] in _OURS
