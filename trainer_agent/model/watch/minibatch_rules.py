"""What a script may do in a minibatch: who calls backward(), which modules are in training mode, and which
parameters may go without a gradient.

BackwardGuard       only the minibatch that is computed calls backward(), or a script's own loop by
                    trireme.backward
Modes               functions          before each minibatch model.train(), then eval() for the modules that
                                       model() left in evaluation mode
                    a loop of its own  the script sets them; an evaluation puts back what it finds
MissingGradients    plain PyTorch leaves a parameter without a gradient alone, a job steps it with a gradient
                    of 0 once it has had one (asynchronous jobs: always)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer_agent.model.buffer_policies import Policy
from trainer_agent.model.flat import Plan
from trainer_agent.own_loop.turns import OwnLoop
from trireme_shared.protocol.errors import UserCodeError

MODE_CHANGED = (
    "forward had {name} in {now} mode, and in an earlier minibatch it was in {before} mode; "
    "trainers do not share modes, so a module has "
    "the same mode in every minibatch: set it in model() (or before the loop), or train in two "
    "jobs, the second with --init-from"
)
MODE_LEFT = (
    "loss(model, batch) leaves {name} in {now} mode; every minibatch begins with it in {before} "
    "mode, as model() says, and not with what the one before "
    "left: put back the modes that loss changes behind its forward pass, or set them in front of "
    "each, or in model()"
)
NAMED_PARAMETERS = 3  # parameters in a warning
MOST_WARNINGS = 5  # warnings of a process
NO_GRADIENT = (
    "{names} got no gradient from a minibatch, so a step takes 0 as its gradient there, and "
    "{cause} moves {it} all the same (plain PyTorch "
    "leaves a parameter without a gradient alone, if no other minibatch of the step has one). If "
    "nothing uses {it}, leave {it} out of the "
    "optimizer, or call requires_grad_(False) in model()"
)
LATE_GRADIENT = (
    "{names} got a first gradient after steps that took 0 in its place, so what the optimizer counts and "
    "keeps of {it} began with the first step; in plain PyTorch, and in synchronous jobs as long as no loss "
    "depends on {it}, it begins with the first gradient"
)


class UserCode(Protocol):
    """The functions of the user's script; see trainer_agent.script.user_module.UserModule. What they raise
    arrives as UserCodeError. `loop`: of a script with a loop of its own, whose body is called as `loss`.
    `buffers`: policies by pattern (see trainer_agent.model.buffer_policies)."""

    @property
    def path(self) -> Path: ...

    @property
    def loop(self) -> OwnLoop | None: ...

    @property
    def buffers(self) -> Mapping[str, Policy]: ...

    def has(self, hook: str) -> bool: ...

    def call(self, hook: str, *arguments: Any) -> Any: ...

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any: ...

    def error_of(self, error: BaseException, *, fatal: bool = False) -> UserCodeError: ...


class Modes:
    """Training mode and evaluation mode of the model's modules, as the script sets them. A mode that is
    another one in some minibatches would be state that trainers do not share, so forward has the same modes
    in all of them. Made when the script has built its model, before the first minibatch. `own_loop`: the
    script's own loop sets the modes."""

    def __init__(self, model: nn.Module, *, own_loop: bool) -> None:
        self._model, self._own_loop = model, own_loop
        modules = list(model.named_modules())
        self._names = [name or type(module).__name__ for name, module in modules]
        self._modules = [module for _, module in modules]
        # A whole model in evaluation mode is how libraries load pretrained ones. It is trained all the same.
        self._evaluating = (
            [module for module in self._modules if not module.training] if model.training else []
        )
        #: A sentence if the modes that the script left are no plain training mode, else "".
        self.notice = "" if own_loop else self._notice()
        self._first: list[bool] | None = None
        #: A sentence if loss left a module in another mode than it had when the minibatch began, which is
        # undone, else "".
        self.left = ""

    def __repr__(self) -> str:
        return f"<Modes: {len(self._evaluating)} of {len(self._modules)} modules stay in evaluation mode>"

    def _notice(self) -> str:
        if all(module.training for module in self._modules):
            return ""
        if not self._evaluating:
            return (
                "model() returned a model in evaluation mode; it is trained in training mode. "
                "Modules that shall stay in evaluation mode "
                "are put there below a model that is in training mode"
            )
        names = [
            name
            for name, module in zip(self._names, self._modules, strict=True)
            if module in self._evaluating
        ]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            "model() left these modules in evaluation mode, and they stay in it while the model is "
            f"trained: {shown}"
        )

    def set_training(self) -> None:
        """Before a minibatch."""
        if self._own_loop:
            return
        self._model.train()
        for module in self._evaluating:
            module.training = False

    def check(self, user: UserCode) -> None:
        """Called after each forward. Raises UserCodeError if it had other modes than in the first
        minibatch."""
        now = [module.training for module in self._modules]
        if self._first is None:
            self._first = now
            begun = [module not in self._evaluating for module in self._modules]
            self.left = "" if self._own_loop else self._difference(MODE_LEFT, begun, now)
        if what := self._difference(MODE_CHANGED, self._first, now):
            raise user.error_of(RuntimeError(what), fatal=True)

    def _difference(self, sentence: str, before: list[bool], now: list[bool]) -> str:
        """`sentence` about the first module whose mode differs, "" if none does."""
        called = {True: "training", False: "evaluation"}
        for name, one, other in zip(self._names, before, now, strict=True):
            if one != other:
                return sentence.format(name=name, before=called[one], now=called[other])
        return ""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules are in evaluation mode, and have their modes again afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


class MissingGradients:
    """Notices trained parameters that get no gradient in a minibatch. A job steps them with a gradient of 0,
    since another lane may have one; where that shows in their values, the user hears of it. `minibatch` after
    each backward. `warnings` are taken by `told`: each parameter is in one of them at most."""

    def __init__(self, plan: Plan) -> None:
        spec = plan.layout.optimizer
        self._names = [place.name for place in plan.parameters]
        options = [
            spec.defaults | spec.groups[plan.layout.segments[place.segment].group]
            for place in plan.parameters
        ]
        self._decays = [bool(each.get("weight_decay")) for each in options]
        names = [spec.class_of(plan.layout.segments[place.segment].group) for place in plan.parameters]
        both = list(zip(names, options, strict=True))
        self._remembers = [name != "SGD" or bool(each.get("momentum")) for name, each in both]
        # a zero gradient is kept as if there was none, but for counters of steps and a dampened momentum
        self._counts = [name != "SGD" or bool(each.get("dampening")) for name, each in both]
        self._had = [False] * len(self._names)
        self._replaced: set[int] = set()  # stepped without a gradient before they had one
        self._told: set[str] = set()
        self._warnings: list[str] = []
        self._count = 0

    def minibatch(self, made: Sequence[int], left: Collection[int] = ()) -> None:
        """`made[i]`: how many gradients parameter i of the plan got. `left`: the parameters that nobody steps
        for want of this lane's gradient."""
        if late := [index for index in sorted(self._replaced) if made[index]]:
            self._replaced.difference_update(late)
            self._tell([self._names[index] for index in late if self._counts[index]], LATE_GRADIENT)
        if all(made):
            self._had = [True] * len(made)
            return
        lacking = [not count and index not in left for index, count in enumerate(made)]
        for moving, cause in (
            (self._decays, "weight decay"),
            (
                [kept and had for kept, had in zip(self._remembers, self._had, strict=True)],
                "what the optimizer has kept",
            ),
        ):
            found = zip(self._names, moving, lacking, strict=True)
            self._tell([name for name, moves, lacks in found if moves and lacks], NO_GRADIENT, cause)
        self._replaced.update(index for index, lacks in enumerate(lacking) if lacks and not self._had[index])
        self._had = [had or bool(count) for had, count in zip(self._had, made, strict=True)]

    def told(self) -> tuple[str, ...]:
        """The warnings since the last call."""
        told, self._warnings = tuple(self._warnings), []
        return told

    def _tell(self, names: list[str], sentence: str, cause: str = "") -> None:
        names = [name for name in names if name not in self._told]
        self._told |= set(names)
        if not names or self._count == MOST_WARNINGS:
            return
        self._count += 1
        more = f" and {len(names) - NAMED_PARAMETERS} more" if len(names) > NAMED_PARAMETERS else ""
        listed = f"the parameter{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED_PARAMETERS])}{more}"
        self._warnings.append(
            sentence.format(names=listed, cause=cause, it="them" if len(names) > 1 else "it")
        )
