"""The losses in what `loss(model, batch)` returned: one, or one for each of several optimizers.

loss, {"loss": loss, ...}             ─► one backward, gradients of all parameters
{"generator": ..., "critic": ...}     ─► a backward for each; its gradients are those of the parameters of
                                         its optimizer alone
a name that is not there, None        ─► that optimizer rests: its parameters are left as they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_agent.model.watch.minibatch_rules import UserCode
from trireme_shared.protocol.metrics import LOSS, is_free_name, loss_in, metrics_beside
from trireme_shared.serving.optimizers.several import Several, losses_of, parts_of

MEAN = "return the minibatch's mean loss, a scalar with a gradient"
NOT_ITS_OWN = (
    "the loss of the optimizer {name} depends on none of its parameters ({parameter}, ...), so they would "
    "get no gradient: a loss trains the parameters of the optimizer with its name alone"
)
NO_REST = (
    "loss(model, batch) returned no loss for the optimizer {name}, and each step of an asynchronous job "
    "steps all of them: give it a loss, or use mode sync"
)
WITH_TABLES = (
    "loss(model, batch) returned a loss for each optimizer, and the model has embedding tables, whose rows "
    "belong to none of them: return one loss, each part of it without gradients for the parameters that it "
    "does not train (detach(), torch.func.functional_call)"
)


class Trained(NamedTuple):
    """One of several losses, the parameters that it trains, and the nodes of its graph."""

    loss: torch.Tensor
    parameters: Sequence[nn.Parameter]
    nodes: set[Any]


class Losses:
    """`total`: what is reported, without a gradient if there are several. `metrics`: what stands beside.
    `resting`: the parameters of the optimizers without a loss, by their places."""

    def __init__(
        self,
        total: torch.Tensor,
        metrics: Mapping[str, Any],
        trained: Sequence[Trained] = (),
        resting: frozenset[int] = frozenset(),
    ) -> None:
        """`trained`: several losses; () for one of all parameters."""
        self.total, self.metrics, self.resting = total, metrics, resting
        self._trained = trained

    def __repr__(self) -> str:
        return f"<Losses: {len(self._trained) or 1}>"

    def leaves(self) -> set[int]:
        """The ids of the tensors that `backward` makes gradients of, as far as the graphs show them."""
        if not self._trained:
            return leaves_in(nodes_of(self.total)) | {id(self.total)}
        found: set[int] = set()
        for each in self._trained:
            found |= leaves_in(each.nodes) & {id(parameter) for parameter in each.parameters}
        return found

    def backward(self) -> None:
        """A graph is kept for the losses that follow only where they share some of it."""
        if not self._trained:
            self.total.backward()  # type: ignore[no-untyped-call]
            return
        graphs = [{node for node in each.nodes if not hasattr(node, "variable")} for each in self._trained]
        for number, each in enumerate(self._trained):
            required = [parameter for parameter in each.parameters if parameter.requires_grad]
            shared = any(not graphs[number].isdisjoint(graph) for graph in graphs[number + 1 :])
            if required:
                torch.autograd.backward(each.loss, inputs=required, retain_graph=shared)


class LossReader:
    """`parameters`: those of the job, in their order, with their `names`. `may_rest`: a step may leave
    optimizers out. `tables`: the model has embedding tables."""

    def __init__(
        self,
        user: UserCode,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        *,
        may_rest: bool = True,
        tables: bool = False,
    ) -> None:
        self._user, self._may_rest, self._tables = user, may_rest, tables
        self._optimizer = optimizer if isinstance(optimizer, Several) else None
        places = {id(parameter): place for place, parameter in enumerate(parameters.values())}
        self._names, self._parameters = list(parameters), list(parameters.values())
        #: by optimizer: the places of its parameters
        self._held = [
            [places[id(p)] for group in part.param_groups for p in group["params"] if id(p) in places]
            for part in parts_of(optimizer)
        ]

    def read(self, found: Any) -> Losses:
        """What the script's function returned. Raises UserCodeError."""
        losses = self._by_optimizer(found)
        if losses is None:
            return Losses(self._checked(self._user.guard(loss_in, found), found), metrics_beside(found))
        if self._tables:
            raise self._user.error_of(RuntimeError(WITH_TABLES), fatal=True)
        return self._each(losses, _beside(losses, found))

    def sums(self, found: Any, records: int) -> dict[str, Any]:
        """Of a script without `evaluate`: what `loss` returned for one minibatch, times its records. Raises
        UserCodeError."""
        losses = self._by_optimizer(found)
        if losses is None:
            values = {LOSS: self._user.guard(loss_in, found), **metrics_beside(found)}
        else:
            given = {name: loss for name, loss in losses.items() if loss is not None}
            values = {LOSS: sum(given.values()), **_named(given), **_beside(losses, found)}
        return {**{name: value * records for name, value in values.items()}, "records": records}

    def _by_optimizer(self, found: Any) -> dict[str, Any] | None:
        """None: it is one loss for all of them. Raises UserCodeError."""
        if self._optimizer is None:
            return None
        losses: dict[str, Any] | None = self._user.guard(losses_of, self._optimizer, found)
        return losses

    def _each(self, losses: Mapping[str, Any], metrics: Mapping[str, Any]) -> Losses:
        trained, resting, given = [], set[int](), {}
        for places, (name, loss) in zip(self._held, losses.items(), strict=True):
            if loss is None:
                resting.update(places)
                if not self._may_rest:
                    raise self._error(NO_REST.format(name=name))
                continue
            given[name] = self._checked(loss, loss, f" as the loss of the optimizer {name}")
            parameters = [self._parameters[place] for place in places]
            required = {id(parameter) for parameter in parameters if parameter.requires_grad}
            nodes = nodes_of(loss)
            if required and required.isdisjoint(leaves_in(nodes)):
                shown = self._names[places[0]]
                raise self._error(NOT_ITS_OWN.format(name=name, parameter=shown))
            trained.append(Trained(loss, parameters, nodes))
        first, *others = (loss.detach() for loss in given.values())
        return Losses(sum(others, first), {**_named(given), **metrics}, trained, frozenset(resting))

    def _checked(self, loss: Any, found: Any, of: str = "") -> torch.Tensor:
        """Raises UserCodeError."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        is_tensor = isinstance(loss, torch.Tensor)
        told = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
        if is_tensor and loss.numel() == 1:
            told = "a scalar that does not depend on the parameters"
        message = f"loss(model, batch) returned {told}{of}; {MEAN}"
        if isinstance(found, tuple | list):
            message += (
                "; other numbers stand beside it in a dict: {'loss': loss, 'accuracy': accuracy}; several "
                "losses are for as many optimizers, in a list as well (docs/habits.md)"
            )
        raise self._user.error_of(TypeError(message))

    def _error(self, message: str) -> Exception:
        return self._user.error_of(TypeError(message), fatal=True)


def _named(losses: Mapping[str, Any]) -> dict[str, Any]:
    """As metrics: those of a list are loss.0, loss.1, ..."""
    return {name if is_free_name(name) else f"{LOSS}.{name}": loss for name, loss in losses.items()}


def _beside(losses: Mapping[str, Any], found: Any) -> dict[str, Any]:
    """The metrics that the script gave with the losses of its optimizers."""
    if not isinstance(found, Mapping):
        return {}
    return {name: value for name, value in found.items() if name not in losses}


def means_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Of what LossReader.sums gave for all minibatches."""
    records = sums.get("records")
    return (
        {name: total / records for name, total in sums.items() if name != "records"}
        if records
        else dict(sums)
    )


def nodes_of(loss: torch.Tensor) -> set[Any]:
    """The nodes of its graph; what a reentrant checkpoint computes is not in it."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return seen


def leaves_in(nodes: set[Any]) -> set[int]:
    """The ids of the tensors whose gradients the nodes make."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}
