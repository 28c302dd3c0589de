"""`trireme.run(script) -> Run`: the command `trireme run` in the background of this process, for scripts and
notebooks.

    run = trireme.run("digits.py", trainers=2, epochs=5)
    result = run.wait()
    print(result.metrics, run.metrics("loss")["loss"][-1])

run() ─► checked ─► STARTING ─► RUNNING ... ─► COMPLETED | FAILED
stop(), nobody keeps the Run, this process ends ─► STOPPED

A Run that nobody keeps, and one that this process leaves behind at its end, is stopped as by stop(). If this
process is killed, all processes of the run are killed with it.
"""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from trireme.background.errors import InvalidSetting, WaitTimedOut
from trireme.background.series import columns_of, spec_in
from trireme.background.supervised import Supervised
from trireme.background.watching import Attended, Picture, watcher
from trireme.preflight import check_path
from trireme.settings import UsageError, check_fields, from_call, merge
from trireme.view.progress import Progress
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import Logs
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DeadlineExceeded, NotFound, TriremeError

if TYPE_CHECKING:
    import torch

START_S = 600.0  # the check of a script alone may take half of it
STOP_S = 100.0  # a checkpoint, then the members one role after the other
KILLED_S = 10.0

_started: weakref.WeakSet[Supervised] = weakref.WeakSet()


def run(
    script: str | Path,
    *,
    trainers: int | None = None,
    pservers: int | str | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    check: bool = True,
    insecure: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Start the job that `trireme run SCRIPT` starts: settings, folders, resuming and reasons of ends are
    those of the command. Returns when everything is checked and members are being started; a job that was
    completed before is not trained again.

    `settings`: of trireme.Config, and those of the command (data_dir, port, storage, ...). `fresh`: from the
    beginning. `accept_changes`: go on with other hyperparameters than before. `check` False: do not try a
    minibatch first. `progress`: show how it goes, in a notebook under the cell, else as lines on stderr (at a
    Python prompt while it is waited for). Keep the Run: one that nobody keeps is stopped. Raises ConfigError
    for settings that cannot be (also Conflict, if the job began with others), UserCodeError if the script
    fails, PeerError if something on this machine does not answer.
    """
    given = {"trainers": trainers, "pservers": pservers, **settings}
    values = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None
    }
    asked = {
        "script": str(script),
        "settings": values,
        "fresh": fresh,
        "accept_changes": accept_changes,
        "check": check,
        "insecure": insecure,
    }
    _check(Path(script), values)
    shown = watcher() if progress else None
    with shown.attended() if shown else nullcontext():
        supervised = Supervised({**asked, "again": _call_of(str(script), values)}, shown)
        _started.add(supervised)
        try:
            begun = supervised.wait({"begun", "ended"}, START_S)
        except BaseException:  # Ctrl-C
            supervised.kill()
            raise
    if not begun:
        supervised.kill()
        raise DeadlineExceeded(f"{script} has not begun within {START_S:g} s")
    if supervised.told.begun is None:
        _raise_end(supervised)
    return Run(supervised, shown)


class Run:
    """A job in the background. `job`: its name; `folder`: its files; `pid`: of the process that supervises
    its members. Leaving `with` stops it, unless it has ended."""

    def __init__(self, supervised: Supervised, shown: Attended | None) -> None:
        """See `run`."""
        assert supervised.told.begun is not None
        self._supervised, self._shown = supervised, shown
        self.job = supervised.told.begun["job"]
        self.folder = Path(supervised.told.begun["folder"])
        weakref.finalize(self, _let_go, supervised).atexit = False

    def __repr__(self) -> str:
        status = self.status()
        return f"<Run {self.job}: {status.phase}{f', {status.training()}' if not self.is_over else ''}>"

    def _repr_html_(self) -> str:
        return Picture(self._supervised.told).html()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._supervised.pid

    @property
    def is_over(self) -> bool:
        """COMPLETED, FAILED or stopped: nothing of it runs."""
        return self._supervised.told.end is not None

    def wait(self, timeout: float | None = None) -> RunResult:
        """Until the job has ended; `timeout` in seconds. An interrupt ends the waiting, not the job.

        Raises JobFailed, with the script's traceback if that was the cause; JobStopped; WaitTimedOut (a
        TimeoutError), which says what the job is doing; PeerError or ClusterError if the run broke off: the
        same call resumes it.
        """
        with self._shown.attended() if self._shown else nullcontext():
            over = self._supervised.wait({"ended"}, timeout)
        if not over:
            now = self.status()
            msg = f"job {self.job} has not ended within {timeout:g} s: it is {now.phase}, {now.training()}"
            raise _with_hint(WaitTimedOut(msg, hint="wait() again, or stop()"))
        result = self.result
        if result is None or self._supervised.told.end is None or self._supervised.told.end.error is not None:
            _raise_end(self._supervised)
        return result

    def stop(self, timeout: float = STOP_S) -> None:
        """As Ctrl-C at `trireme run`: a checkpoint is saved (at most 30 s), then all members end; the same
        call of `trireme.run` resumes the job. Called again meanwhile, or after `timeout` seconds, it stops at
        once. Does nothing once the job has ended."""
        if self.is_over:
            return
        with self._shown.attended() if self._shown else nullcontext():
            self._supervised.interrupt()
            if not self._supervised.wait({"ended"}, timeout):
                self._supervised.kill()
                self._supervised.wait({"ended"}, KILLED_S)

    @property
    def result(self) -> RunResult | None:
        """How the job ended; None while it goes on, and of one that was stopped."""
        end = self._supervised.told.end
        return RunResult.of(end.result) if end is not None and end.result is not None else None

    def status(self) -> Progress:
        """Where it is, half a second ago at most: `phase` (at the end COMPLETED, FAILED or STOPPED), `epoch`
        (from 0), `step`, `loss`, `records_per_s`, `eta_s`, members, ..."""
        told = self._supervised.told
        return told.progress if told.end is None else replace(told.progress, phase=told.end.phase, eta_s=None)

    def metrics(self, name: str | Sequence[str] = (), by: str = "step") -> dict[str, list[Any]]:
        """Columns of one length: `step` (or `epoch`, from 1), then each metric; None where a metric has no
        value. `name`: one or several; () all. Also while the job goes on. `pandas.DataFrame(run.metrics())`
        takes it. Of long jobs several steps share a mean.

        Raises NotFound (there is no such metric), InvalidArgument, Conflict (a job without a master),
        PeerError, DeadlineExceeded.
        """
        names = [name] if isinstance(name, str) else list(name)
        return columns_of(self.folder, spec_in(self.folder), names, by, running=not self.is_over)

    def logs(self, member: str = "", lines: int = 100) -> str:
        """The last lines that members wrote (`trainer-0`; "": all of them, in the order of time), with what
        the script printed there."""
        found = Logs(lambda: sorted((self.folder / "logs").glob("*.log")), member)
        if not found.members:
            there = (
                ", ".join(path.stem for path in sorted((self.folder / "logs").glob("*.log"))) or "none yet"
            )
            raise NotFound(f"job {self.job} has no log of {member or 'any member'}; there are: {there}")
        return "\n".join(line.text if member else f"{line.member}  {line.text}" for line in found.last(lines))

    @property
    def model_path(self) -> str:
        """Path or URL of the trained model's state_dict (`model.pt`). Raises NotFound before the job is
        COMPLETED."""
        return self._export("state_dict")

    def load(self, *, best: bool = False) -> dict[str, torch.Tensor]:
        """The state_dict of the trained model, on the CPU; of the best evaluation with `best` (setting
        keep_best). Raises NotFound."""
        import torch  # noqa: PLC0415  it takes a second

        with files.open_read(self._export("best_state_dict" if best else "state_dict")) as file:
            state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return state

    def _export(self, kind: str) -> str:
        result = self.result
        if result is None or kind not in result.exports:
            msg = f"job {self.job} has no {kind} of its model: it is {self.status().phase}"
            raise NotFound(msg, hint="a COMPLETED job has one; best: with the setting keep_best")
        return result.exports[kind]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `trireme run --json` prints, under the same names. `state` (also `phase`): COMPLETED or FAILED,
    then with `reason`, `cause` and perhaps the script's `failure`. `metrics`: of the evaluation after
    training. `loss`: mean of the last epoch that was begun, `loss_by_epoch`: {"epoch", "loss"} of each.
    `exports`: kind (`safetensors`, `state_dict`, with keep_best also `best_...`) -> path or URL of the model.
    `best`: the best evaluation, `stopped_step`: where stop_early ended training. `history`: accepted changes
    of hyperparameters, the newest last ({"number", "options", "time", "text"}). `discarded`, `losses`: what
    was not trained. `seconds`, `restarts` (by member): of all runs that resumed each other. `logs`: their
    folder."""

    job: str
    state: str
    phase: str
    reason: str
    cause: str | None
    resumable: bool
    mode: str
    epochs: int
    epochs_done: int
    seconds: float
    metrics: dict[str, float]
    loss: float | None
    loss_by_epoch: list[dict[str, Any]]
    steps: int | None
    records: int
    discarded: dict[str, Any]
    losses: dict[str, dict[str, int]]
    generation: int
    restarts: dict[str, int]
    exports: dict[str, str]
    best: dict[str, Any] | None
    history: list[dict[str, Any]]
    stopped_step: int | None
    failure: dict[str, Any] | None
    logs: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """One of another version may have more, and lack what came later."""
        known = {"state": document.get("phase"), **document}
        return cls(**{field.name: known.get(field.name) for field in fields(cls)})  # type: ignore[arg-type]


def _check(script: Path, values: dict[str, Any]) -> None:
    """What needs no other process. Raises InvalidSetting."""
    try:
        check_path(script)
        given = merge([from_call(values, "trireme.run")])
        json.dumps(values)
        check_fields({name: setting for name, setting in given.items() if name != "init_from"})
    except UsageError as error:
        raise _with_hint(InvalidSetting(error.message, hint=error.hint)) from None
    except TypeError as error:
        raise InvalidSetting(
            f"trireme.run: a setting is neither text, number nor a list or dict of them: {error}"
        ) from None


def _call_of(script: str, values: dict[str, Any]) -> str:
    return (
        f"trireme.run({', '.join([repr(script), *(f'{name}={value!r}' for name, value in values.items())])})"
    )


def _with_hint(error: TriremeError) -> TriremeError:
    """Python's traceback shows what to do, too."""
    if error.hint and error.hint not in getattr(error, "__notes__", ()):
        error.add_note(error.hint)
    return error


def _raise_end(supervised: Supervised) -> NoReturn:
    end = supervised.told.end
    assert end is not None
    assert end.error is not None
    raise _with_hint(end.error).with_traceback(None)


def _let_go(supervised: Supervised) -> None:
    """Nobody keeps its Run."""
    if supervised.told.end is None and not supervised.is_interrupted:
        supervised.interrupt()


def _stop_all() -> None:
    """This process ends: wait for what it has started, as `trireme run` does after Ctrl-C."""
    left = [each for each in _started if each.told.end is None and each.is_ours]
    for each in left:
        _let_go(each)
    try:
        deadline = clock.monotonic() + STOP_S
        for each in left:
            each.wait({"ended"}, max(0.0, deadline - clock.monotonic()))
    finally:  # also after another Ctrl-C
        for each in left:
            each.kill()


atexit.register(_stop_all)
