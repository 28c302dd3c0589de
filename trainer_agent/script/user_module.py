"""The user's script as a plain module: loaded by path, its functions (hooks) checked, its errors turned into UserCodeError.

    script.py ──load──► UserModule ──call("loss", model, batch)──► value | UserCodeError (traceback of the user's frames)

Raises InvalidArgument for a script that lacks something, UserCodeError for what its code raises.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, cast, get_args

from shared.errors import InvalidArgument, TriremeError, UserCodeError
from shared.records.datasets import Dataset

DATASETS = get_args(get_args(Dataset)[0])
REQUIRED = {
    "model": "def model(): ... returning a torch.nn.Module",
    "dataset": "def dataset(): ... returning a trireme.data dataset",
    "loss": "def loss(model, batch): ... returning the mean loss of the minibatch",
    "optimizer": "def optimizer(model): ... returning a torch.optim optimizer",
}
OPTIONAL = ("collate", "scheduler", "evaluation_dataset", "evaluate", "metrics")
ARGUMENTS = {"model": 0, "dataset": 0, "loss": 2, "optimizer": 1, "collate": 1, "scheduler": 1}
ARGUMENTS |= {"evaluation_dataset": 0, "evaluate": 2, "metrics": 1}
_PACKAGES = Path(__file__).resolve().parents[2]
_OURS = ("shared", "trainer_agent", "trireme")


class _FromSource(SourceFileLoader):
    """Never from compiled bytecode beside the file: that is taken for the source if both are of one second and one size, also
    after an edit, and nobody compares its digest."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class UserModule:
    """The hooks of one script. `call` runs a hook; `has` says whether an optional one exists."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path = path
        self._hooks: dict[str, Callable[..., Any]] = {}
        for name, shape in REQUIRED.items():
            if getattr(module, name, None) is None:
                raise InvalidArgument(f"{path} has no function {name!r}", hint=f"add {shape}")
        for name in (*REQUIRED, *OPTIONAL):
            hook = getattr(module, name, None)
            if hook is not None:
                self._hooks[name] = _checked(path, name, hook)
        self.config = _config(path, getattr(module, "config", None))

    def __repr__(self) -> str:
        return f"<UserModule {self.path}: {', '.join(self._hooks)}>"

    def has(self, hook: str) -> bool:
        return hook in self._hooks

    def call(self, hook: str, *arguments: Any) -> Any:
        return self.guard(self._hooks[hook], *arguments)

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any:
        """Run the user's code, or code that may call it (backward, a scheduler's step)."""
        try:
            return code(*arguments)
        except Exception as error:
            raise self.error_of(error) from error

    def dataset(self, hook: str = "dataset") -> Dataset:
        """The dataset that `dataset()` or `evaluation_dataset()` describes."""
        found = self.call(hook)
        if not isinstance(found, DATASETS):
            raise InvalidArgument(
                f"{hook}() of {self.path} returned {type(found).__name__}, not a dataset",
                hint='return one of trireme.data, for example trireme.data.Parquet("train-*.parquet")',
            )
        return cast("Dataset", found)

    def error_of(self, error: BaseException, *, fatal: bool = False) -> UserCodeError:
        """`error` as UserCodeError, with the traceback cut down to the frames below the script's folder. If there are none, it
        has the frames of libraries, never ours. `fatal`: see UserFailure."""
        return _user_code_error(error, _message(error), self.path.parent, fatal=fatal)


def load(script: str | Path) -> UserModule:
    """Run the script as a module (not as `__main__`), with its folder first on sys.path."""
    path = Path(script).expanduser().resolve()
    if not path.is_file():
        raise InvalidArgument(f"there is no script {path}", hint="give the path of a Python file")
    name = (
        path.stem if path.stem not in sys.modules and path.stem.isidentifier() else f"trireme_script_{abs(hash(path))}"
    )
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise InvalidArgument(f"{path} is not a Python file", hint="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _user_code_error(error, str(error), path.parent, f"{path.name} cannot be loaded: ") from error
    return UserModule(path, module)


def _checked(path: Path, name: str, hook: Callable[..., Any] | object) -> Callable[..., Any]:
    count = ARGUMENTS[name]
    if not callable(hook):
        raise InvalidArgument(
            f"{name!r} in {path} is {type(hook).__name__}, not a function", hint=REQUIRED.get(name, "")
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return hook
    try:
        signature.bind(*range(count))
    except TypeError:
        raise InvalidArgument(
            f"{name}{signature} in {path} does not take {count} argument{'' if count == 1 else 's'}",
            hint=REQUIRED.get(name, f"define it with {count}"),
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
        raise InvalidArgument(f"config in {path} is {type(config).__name__}", hint="use trireme.Config(...) or a dict")
    return dict(config)


def _user_code_error(
    error: BaseException, message: str, folder: Path, prefix: str = "", *, fatal: bool = False
) -> UserCodeError:
    return UserCodeError(
        f"{prefix}{type(error).__name__}: {message}",
        error_type=type(error).__name__,
        error_message=message,
        traceback="".join(_trimmed(error, folder)),
        fatal=fatal,
    )


def _message(error: BaseException) -> str:
    if isinstance(error, TriremeError) and error.hint:
        return f"{error.message}; {error.hint}"
    return str(error)


def _trimmed(error: BaseException, folder: Path) -> list[str]:
    frames = [
        frame
        for frame in traceback.extract_tb(_first_frame_below(error.__traceback__, folder))
        if not _is_of_trireme(frame.filename)
    ]
    users = [frame for frame in frames if _is_below(frame.filename, folder)]
    lines = traceback.format_exception_only(type(error), error)
    if type(error).__module__.partition(".")[0] in _OURS:
        lines = [f"{type(error).__name__}: {_message(error)}\n"]
    if not frames or (isinstance(error, SyntaxError) and not users):  # the message of a SyntaxError has the place
        return lines
    return ["Traceback (most recent call last):\n", *traceback.format_list(users or frames), *lines]


def _first_frame_below(trace: TracebackType | None, folder: Path) -> TracebackType | None:
    walk = trace
    while walk is not None and not _is_below(walk.tb_frame.f_code.co_filename, folder):
        walk = walk.tb_next
    return walk if walk is not None else trace


def _is_of_trireme(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGES) and path.relative_to(_PACKAGES).parts[0] in _OURS


def _is_below(filename: str, folder: Path) -> bool:
    path = Path(filename)
    return path.is_relative_to(folder) and "site-packages" not in path.parts
