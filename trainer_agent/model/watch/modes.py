"""Training mode and evaluation mode of the model's modules, as the script sets them.

    functions          before each minibatch model.train(), then eval() for the modules that model() left in evaluation mode
    a loop of its own  the script sets them; an evaluation puts back what it finds

A mode that is another one in some minibatches would be state that trainers do not share, so forward has the same modes in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trainer_agent.model.watch.backward_guard import UserCode

CHANGED = (
    "forward had {name} in {now} mode, and in an earlier minibatch it was in {before} mode; trainers do not share modes, so a module has "
    "the same mode in every minibatch: set it in model() (or before the loop), or train in two jobs, the second with --init-from"
)
LEFT = (
    "loss(model, batch) leaves {name} in {now} mode; every minibatch begins with it in {before} mode, as model() says, and not with what the one before "
    "left: put back the modes that loss changes behind its forward pass, or set them in front of each, or in model()"
)


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


class Modes:
    """Made when the script has built its model, before the first minibatch. `own_loop`: the script's own loop sets the modes."""

    def __init__(self, model: nn.Module, *, own_loop: bool) -> None:
        self._model, self._own_loop = model, own_loop
        modules = list(model.named_modules())
        self._names = [name or type(module).__name__ for name, module in modules]
        self._modules = [module for _, module in modules]
        # A whole model in evaluation mode is how libraries load pretrained ones. It is trained all the same.
        self._evaluating = [module for module in self._modules if not module.training] if model.training else []
        #: A sentence if the modes that the script left are no plain training mode, else "".
        self.notice = "" if own_loop else self._notice()
        self._first: list[bool] | None = None
        #: A sentence if loss left a module in another mode than it had when the minibatch began, which is undone, else "".
        self.left = ""

    def __repr__(self) -> str:
        return f"<Modes: {len(self._evaluating)} of {len(self._modules)} modules stay in evaluation mode>"

    def _notice(self) -> str:
        if all(module.training for module in self._modules):
            return ""
        if not self._evaluating:
            return (
                "model() returned a model in evaluation mode; it is trained in training mode. Modules that shall stay in evaluation mode "
                "are put there below a model that is in training mode"
            )
        names = [name for name, module in zip(self._names, self._modules, strict=True) if module in self._evaluating]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"model() left these modules in evaluation mode, and they stay in it while the model is trained: {shown}"

    def set_training(self) -> None:
        """Before a minibatch."""
        if self._own_loop:
            return
        self._model.train()
        for module in self._evaluating:
            module.training = False

    def check(self, user: UserCode) -> None:
        """Called after each forward. Raises UserCodeError if it had other modes than in the first minibatch."""
        now = [module.training for module in self._modules]
        if self._first is None:
            self._first = now
            begun = [module not in self._evaluating for module in self._modules]
            self.left = "" if self._own_loop else self._difference(LEFT, begun, now)
        if what := self._difference(CHANGED, self._first, now):
            raise user.error_of(RuntimeError(what), fatal=True)

    def _difference(self, sentence: str, before: list[bool], now: list[bool]) -> str:
        """`sentence` about the first module whose mode differs, "" if none does."""
        called = {True: "training", False: "evaluation"}
        for name, one, other in zip(self._names, before, now, strict=True):
            if one != other:
                return sentence.format(name=name, before=called[one], now=called[other])
        return ""
