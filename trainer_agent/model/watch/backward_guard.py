"""Who may call backward(): only the minibatch that is computed, or a script's own loop by trireme.backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer_agent.own_loop.turns import OwnLoop
from trireme_shared.protocol.errors import UserCodeError


class UserCode(Protocol):
    """The functions of the user's script; see trainer_agent.script.user_module.UserModule. What they raise arrives as
    UserCodeError. `loop`: of a script with a loop of its own, whose body is called as `loss`."""

    @property
    def path(self) -> Path: ...

    @property
    def loop(self) -> OwnLoop | None: ...

    def has(self, hook: str) -> bool: ...

    def call(self, hook: str, *arguments: Any) -> Any: ...

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any: ...

    def error_of(self, error: BaseException, *, fatal: bool = False) -> UserCodeError: ...


OWN_BACKWARD = (
    "the script calls backward() itself; {instead} (for gradients that the loss needs, use torch.autograd.grad)"
)


class BackwardGuard:
    """Only `run` may make gradients of parameters. Those of a backward() in the user's code would be taken for the minibatch's:
    half gradients would be pushed, or some counted twice. The parameters' hooks call `permit`."""

    def __init__(self, user: UserCode) -> None:
        self._user = user
        self._running = self._refused = False
        instead = (
            "return the loss, and Trireme calls backward() on it"
            if user.loop is None
            else "call trireme.backward(loss)"
        )
        self._message = OWN_BACKWARD.format(instead=instead)

    def begin(self) -> None:
        """Before anything of a minibatch: a script's own loop runs to its next batch."""
        if self._user.loop is not None:
            self._user.loop.next_pass()

    def permit(self, _: torch.Tensor | None = None) -> None:
        """Raises RuntimeError in a backward() that is not `run`'s."""
        if not self._running:
            self._refused = True
            raise RuntimeError(self._message)

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call the user's function. Raises UserCodeError if it called backward(), even if it caught what that raised. It is fatal: no record is
        at fault, and another attempt at the same records might not do it again."""
        self._refused = False
        try:
            found = self._user.call(hook, *arguments)
        except UserCodeError as error:
            if self._refused and isinstance(error.__cause__, RuntimeError) and str(error.__cause__) == self._message:
                raise self._user.error_of(error.__cause__, fatal=True) from error.__cause__
            raise
        if self._refused:
            raise self._user.error_of(RuntimeError(self._message), fatal=True)
        return found

    def run(self, loss: torch.Tensor) -> bool:
        """Backward; a script's own loop then runs to its optimizer.step(). False: its GradScaler has left that step out."""
        self._running = True
        try:
            self._user.guard(loss.backward)
        finally:
            self._running = False
        return self._user.loop is None or self._user.loop.end_pass()

    def reported(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to report: `loss`, as it was before the script's GradScaler scaled it."""
        if self._user.loop is None or self._user.loop.true_loss is None:
            return loss
        return self._user.loop.true_loss

    @property
    def row_factor(self) -> float:
        """Factor for the gradients of embedding tables' rows: the script's GradScaler does not see them."""
        return 1.0 if self._user.loop is None else self._user.loop.scaling.row_factor
