"""Which parameters require a gradient: what the script makes of it in a minibatch, and that all lanes of a
step make the same of it.

    a step begins ─► each lane begins with what the version says ─► loss may call requires_grad_
        ─► backward ─► frozen: no gradient, so whoever steps leaves these parameters as they are
                       thawed: frozen once more, because loss thawed them when forward had used them already
        ─► goes with the lane's result, becomes part of the next version

So a trainer that joins, or goes back to a checkpoint, goes on with what is frozen there, whatever it saw
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_agent.model.compute import lanes_differ
from trainer_agent.model.flat import Plan
from trainer_agent.model.watch.minibatch_rules import UserCode
from trireme_shared.protocol.lanes import intervals
from trireme_shared.protocol.records.step import Numbers, numbers_in

IN_BACKWARD = (
    "changed requires_grad of the parameter {name} in backward; call requires_grad_ in loss(model, batch), "
    "in front of forward"
)


class FrozenParameters:
    """`begin_step` once for each step, then for each lane of it `begin`, `forward_over`, `backward_over`."""

    def __init__(self, plan: Plan, parameters: Sequence[nn.Parameter], *, thaws: bool) -> None:
        """`parameters`: those of `plan`, in its order. `thaws`: the script may change what requires a
        gradient."""
        self._places, self._parameters, self._first = plan.parameters, parameters, plan.layout.frozen
        self._blocks_of = [plan.blocks_of(place) for place in plan.parameters]
        self._members: dict[int, set[int]] = {}  # by block: the parameters in it
        for index, blocks in enumerate(self._blocks_of):
            for block in blocks:
                self._members.setdefault(block, set()).add(index)
        self._thaws = thaws
        self._begun = self._required(self._first)
        self._now = list(self._begun)
        self._of_step: tuple[Numbers, Numbers] | None = None  # as the first lane of the step says
        #: of the last lane, see NodeResult; None: nothing is ever frozen in this job
        self.frozen: Numbers | None = () if thaws else None
        self.thawed: Numbers = ()
        #: the parameters that have no gradient in this lane, by their places in the plan
        self.indices: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"<FrozenParameters: {len(self.indices)} of {len(self._parameters)}>"

    def begin_step(self, frozen: Numbers | None) -> None:
        """`frozen`: what requires no gradient then; None: as at first."""
        if self._thaws:
            self._begun = self._required(self._first if frozen is None else frozen)
            self._of_step = None

    def begin(self) -> None:
        """In place: the parameters require a gradient as they do when the step begins."""
        for parameter, required in zip(self._parameters, self._begun, strict=True):
            if self._thaws and parameter.requires_grad is not required:
                parameter.requires_grad_(required)

    def forward_over(self) -> bool:
        """Called in front of backward; answers whether forward, or loss around it, has changed anything."""
        if not self._thaws:
            return False
        self._now = [parameter.requires_grad for parameter in self._parameters]
        self.indices = frozenset(index for index, required in enumerate(self._now) if not required)
        self._tell()
        return self._now != self._begun

    def backward_over(self, user: UserCode, made: Sequence[int]) -> None:
        """`made`: how many gradients each parameter got. Raises UserCodeError: another lane of this step has
        other frozen parameters."""
        if not self._thaws:
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad is not self._now[index]:
                message = f"loss(model, batch) {IN_BACKWARD.format(name=self._places[index].name)}"
                raise user.error_of(RuntimeError(message), fatal=True)
        late = {
            index
            for index, (required, before) in enumerate(zip(self._now, self._begun, strict=True))
            if required and not before and not made[index]
        }
        if late:
            self.indices |= late
            self._tell(late)
        self._compare(user)

    def idle_blocks(self) -> set[int]:
        """Blocks of which no parameter has a gradient in this lane."""
        touched = {block for index in self.indices for block in self._blocks_of[index]}
        return {block for block in touched if self._members[block] <= self.indices}

    def _required(self, frozen: Numbers) -> list[bool]:
        numbers = set(numbers_in(frozen))
        return [place.number not in numbers for place in self._places]

    def _tell(self, late: set[int] | None = None) -> None:
        self.frozen = self._numbers(self.indices)
        self.thawed = self._numbers(late or ())

    def _numbers(self, indices: Sequence[int] | frozenset[int] | set[int]) -> Numbers:
        return tuple(intervals(sorted(self._places[index].number for index in indices)))

    def _compare(self, user: UserCode) -> None:
        assert self.frozen is not None
        mine = self.frozen, self.thawed
        if self._of_step is None:
            self._of_step = mine
        for now, before in zip(mine, self._of_step, strict=True):
            if differ := set(numbers_in(now)) ^ set(numbers_in(before)):
                raise user.error_of(RuntimeError(lanes_differ(self._places, min(differ))), fatal=True)


def thaws(plan: Plan, user: UserCode) -> bool:
    """Whether the script may change what requires a gradient: in functions of a synchronous job."""
    return bool(plan.layout.sizes) and user.loop is None


def on_gradient(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call `hook` when autograd has made a gradient of it, from when it requires one."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses a hook of one that requires none
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    handle = register(hook)
    parameter.requires_grad_(required)
    return handle
