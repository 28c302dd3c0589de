"""`trireme.prepare` and `trireme.backward`: a training loop of one's own, with five changed lines.

    model, optimizer, batches = trireme.prepare(model, optimizer, dataset, epochs=5)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        trireme.backward(loss)
        optimizer.step()

In a trainer the other side of the loop is there already. Under `python script.py` it is plain.py, in a thread
beside the script.
"""

from __future__ import annotations

import atexit
import difflib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_agent.model.buffer_policies import Policy, checked
from trainer_agent.own_loop.source import has_own_loop
from trainer_agent.own_loop.turns import Batches, Prepared, running
from trainer_agent.script.user_module import LoopModule
from trireme.config import Config
from trireme.plain import plain_spec, run
from trireme.settings import SETTINGS
from trireme.view.chart import show_chart
from trireme_shared.protocol.errors import TriremeError, UserCodeError
from trireme_shared.protocol.metrics import LOSS

if TYPE_CHECKING:
    import torch
    from torch import nn


def prepare(
    model: nn.Module,
    optimizer: Any,
    dataset: Any,
    *,
    scheduler: Any = None,
    collate: Callable[..., Any] | None = None,
    ids: Callable[..., Any] | None = None,
    evaluation_dataset: Any = None,
    evaluate: Callable[..., Any] | None = None,
    evaluation_metrics: Callable[..., Any] | None = None,
    metrics: Callable[..., Any] | None = None,
    buffers: Mapping[str, Policy] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any, Batches]:
    """The model and optimizer to train with, and the minibatches of all epochs to loop over.

    `optimizer`: a torch.optim.Optimizer, or a list or dict of them, each with parameters of its own; it is
    returned as it is. `dataset`, `evaluation_dataset`: of trireme.data. `scheduler`: of
    torch.optim.lr_scheduler (or a list or dict of them), or a function that makes it of the optimizer;
    Trireme steps it, and what the script's own calls of its `step()` do is nothing. `collate`,
    `ids`, `evaluate`, `evaluation_metrics`, `metrics`, `buffers`: as in a script of functions
    (docs/script.md). `config`: the job's settings, of which `settings` name single ones (epochs=5,
    global_batch_size=256); if it is left out, what the module calls `config`. The command line, the
    environment and trireme.toml win over both.
    Raises RuntimeError if it was called before, TypeError and ValueError for arguments that cannot be,
    InvalidArgument for `buffers`, ConfigError for values of settings; under plain Python also InvalidArgument
    and DatasetError.
    """
    if config is None:
        found = sys._getframe(1).f_globals.get("config")  # noqa: SLF001  the script's module
        config = found if isinstance(found, Config) else {}
    for name in settings:
        if name not in SETTINGS:
            similar = difflib.get_close_matches(name, SETTINGS, n=1)
            msg = f"trireme.prepare got {name!r}, which is no setting" + (
                f"; did you mean {similar[0]}?" if similar else ""
            )
            raise TypeError(msg)
    given = {
        "scheduler": scheduler,
        "collate": collate,
        "ids": ids,
        "evaluation_dataset": evaluation_dataset,
        "evaluate": evaluate,
        "evaluation_metrics": evaluation_metrics,
        "metrics": metrics,
    }
    base = config.to_dict() if isinstance(config, Config) else dict(config)
    parts = Prepared(
        model,
        optimizer,
        dataset,
        {name: value for name, value in given.items() if value is not None},
        Config(**base | settings).to_dict(),
        checked(buffers, "buffers, as trireme.prepare got it,"),
    )
    loop = running()
    if loop is None:
        _check_runs_as_main()
        loop = _PlainLoop().loop
    return loop.prepare(parts)


def backward(loss: torch.Tensor | Mapping[str, Any] | Sequence[torch.Tensor | None]) -> None:
    """Instead of `loss.backward()`: once for each batch, before `optimizer.step()`.

    `loss`: the minibatch's mean, a scalar tensor; of several optimizers also the loss of each, by name or in
    their order, None for one that is not stepped with this batch. Raises RuntimeError for a call that is
    not in its place in the loop, TypeError for another value, InvalidArgument for a dict or list without the
    losses of the optimizers.
    """
    loop = running()
    if loop is None:
        raise RuntimeError("trireme.backward was called, and trireme.prepare was not called in this thread")
    loop.backward(loss)


def _check_runs_as_main() -> None:
    """A master and trainers import a script that has a reader in it: that must not train. Raises
    RuntimeError."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_globals.get("__name__")
    if frame.f_code.co_name == "<module>" and name != "__main__":
        msg = (
            f"{name} calls trireme.prepare when it is imported; put the loop under `if __name__ == "
            '"__main__":`'
        )
        raise RuntimeError(msg)


@contextmanager
def _hints_told() -> Iterator[None]:
    """Python's own traceback shows what to do, too."""
    try:
        yield
    except TriremeError as error:
        if error.hint:
            error.add_note(error.hint)
        raise


class _PlainLoop:
    """Trains the script of the main module in this process, one lane; the script stays in the thread that it
    is in."""

    def __init__(self) -> None:
        path = Path(getattr(sys.modules["__main__"], "__file__", None) or "script.py").resolve()
        with _hints_told():
            if path.is_file():
                has_own_loop(path)  # in a loop over epochs it would be refused at its end
        self._user = LoopModule(path)
        self.loop = self._user.loop
        self.loop.begin_here()
        threading.Thread(target=self._train, name="trireme", daemon=True).start()
        atexit.register(self._tell_if_left)

    def _train(self) -> None:
        try:
            self.loop.wait_here()
            with _hints_told():
                spec = plain_spec(self._user, {})
                for told in self._user.taken_over({}):
                    print(told, file=sys.stderr)  # noqa: T201
                result = run(self._user, spec, report=partial(print, file=sys.stderr))
            for name, value in result.metrics.items():
                print(f"{name} {value:.6g}")  # noqa: T201
            show_chart(LOSS, result.curve)
        except UserCodeError as error:
            self.loop.fail_here(error.__cause__ or error)
        except BaseException as error:  # noqa: BLE001  it is raised in the script
            self.loop.fail_here(error)
        else:
            self.loop.finish_here()

    def _tell_if_left(self) -> None:
        if not self.loop.is_over and getattr(sys, "last_value", None) is None:
            print(  # noqa: T201
                "the script has left its loop before training was over; `trireme run` refuses that",
                file=sys.stderr,
            )
