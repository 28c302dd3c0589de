"""Which parameters a step leaves as they are, as torch.optim leaves one whose `grad` is None: what the script
makes of `requires_grad` in a minibatch, and which parameters no minibatch has used yet.

    a step begins ─► each lane begins with what the version says ─► loss may call requires_grad_
        ─► backward ─► frozen: no gradient, because it requires none
                       unused: no gradient yet, or none since it began to require one: no loss depended on it,
                               or forward had used it before it was thawed
                       resting: it belongs to one of several optimizers, which has no loss in this step
        ─► goes with the lane's result, becomes part of the next version

All lanes of a step freeze the same parameters and step the same optimizers, and parameters that none of them
uses are unused in the step. A trainer that joins, or goes back to a checkpoint, goes on with what the version
says, whatever it saw before.

What is frozen and unused is known in front of backward, from the graph, so that blocks can be sent while
backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, ne

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_agent.model.compute import lanes_differ
from trainer_agent.model.flat import Plan
from trainer_agent.model.losses import Losses
from trainer_agent.model.watch.minibatch_rules import UserCode
from trireme_shared.protocol.lanes import intervals
from trireme_shared.protocol.records.step import ParameterNumbers, StepRecord, numbers_in

IN_BACKWARD = (
    "changed requires_grad of the parameter {name} in backward; call requires_grad_ in loss(model, batch), "
    "in front of forward"
)
REQUIRED = attrgetter("requires_grad")


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
        self._is_sync, self._thaws = bool(plan.layout.sizes), thaws
        #: what the version says, and what it means here: by parameter, whether it requires a gradient when
        # the step begins; its places in the plan, if no step has used it
        self._of_version: tuple[ParameterNumbers | None, ParameterNumbers | None] = ((), ())
        self._begun = [True] * len(parameters)
        self._begun_unused: frozenset[int] = frozenset()
        self._now = self._begun  # in this lane
        self._unused: frozenset[int] = frozenset()  # with those that this lane has thawed
        self._of_step: ParameterNumbers | None = None  # what is frozen, as the first lane of the step says
        self._frozen: frozenset[int] = frozenset()  # in this lane
        self._spared: frozenset[int] = frozenset()  # required and unused, as the graph says
        self._spared_before: frozenset[int] = frozenset()  # of the last lane, as its backward said
        self._resting: frozenset[int] = frozenset()  # in this lane: their optimizer has no loss
        self._resting_of_step: ParameterNumbers | None = None  # as the first lane of the step says
        self._told = self._frozen, self._spared, self._resting  # as places: `frozen`, `unused`, `resting`
        #: of the last lane, see NodeResult; None: not known in this job
        self.frozen: ParameterNumbers | None = () if self._is_sync else None
        self.unused: ParameterNumbers | None = self.frozen
        #: the parameters that this lane leaves as they are, by their places in the plan
        self.indices: frozenset[int] = frozenset()
        self.resting: ParameterNumbers = ()
        #: blocks of which all parameters are frozen or rest in this lane, and so in all lanes of the step
        self.idle: frozenset[int] = frozenset()
        self.begin_step(None)

    def __repr__(self) -> str:
        return f"<FrozenParameters: {len(self.indices)} of {len(self._parameters)}>"

    def begin_step(self, version: StepRecord | None) -> None:
        """`version`: which the step goes on from; None: the first one."""
        frozen, unused = (version.frozen, version.unused) if version is not None else (None, None)
        self._begin(frozen, unused)

    def next_step(self) -> None:
        """The step that follows is this process's own, with what the last lane has left."""
        self._begin(self.frozen, self.unused)

    def _begin(self, frozen: ParameterNumbers | None, unused: ParameterNumbers | None) -> None:
        if self._is_sync:
            self._of_step = self._resting_of_step = None
            if (frozen, unused) == self._of_version:
                return
            self._of_version = frozen, unused
            left = self._indices(self._first if frozen is None else frozen)
            self._begun = [index not in left for index in range(len(self._places))]
            every = frozenset(range(len(self._places)))
            self._begun_unused = every if unused is None else self._indices(unused)

    def begin(self) -> None:
        """In place: the parameters require a gradient as they do when the step begins."""
        if self._thaws and self._required() != self._begun:
            for parameter, required in zip(self._parameters, self._begun, strict=True):
                parameter.requires_grad_(required)

    def forward_over(self, losses: Losses) -> bool:
        """Called in front of backward; answers whether something is new, so that only the end of backward
        shows whether it is as the graph says."""
        if not self._is_sync:
            return False
        is_new = losses.resting != self._resting
        if (now := self._required()) != self._now or is_new:
            self._now, self._resting = now, losses.resting
            self._frozen = frozenset(index for index, required in enumerate(now) if not required)
            left = self._frozen | self._resting
            touched = {block for index in left for block in self._blocks_of[index]}
            self.idle = frozenset(block for block in touched if self._members[block] <= left)
        self._unused = self._begun_unused
        if now != self._begun:
            both = enumerate(zip(now, self._begun, strict=True))
            self._unused = self._unused.union(
                index for index, (is_now, begun) in both if is_now and not begun
            )
        self._spared = self._unused - self._frozen - self._resting
        if self._spared and self._thaws:  # a loop of its own may change gradients until its step
            used = losses.leaves()
            self._spared = frozenset(each for each in self._spared if id(self._parameters[each]) not in used)
        self._tell()
        return self._now != self._begun or self._spared != self._spared_before

    def backward_over(self, user: UserCode, made: Sequence[int]) -> bool:
        """`made`: how many gradients each parameter got. Answers whether a parameter got one that the graph
        did not show. Raises UserCodeError: another lane of this step has other frozen parameters."""
        if not self._is_sync:
            return False
        if (now := self._required()) != self._now:
            place = next(compress(self._places, map(ne, now, self._now)))
            message = f"loss(model, batch) {IN_BACKWARD.format(name=place.name)}"
            raise user.error_of(RuntimeError(message), fatal=True)
        expected = self._spared
        self._spared = self._spared_before = frozenset(index for index in expected if not made[index])
        self._tell()
        self._compare(user)
        return self._spared != expected

    def _required(self) -> list[bool]:
        return list(map(REQUIRED, self._parameters))

    def _tell(self) -> None:
        self.indices = self._frozen | self._spared | self._resting
        if (told := (self._frozen, self.indices & self._unused, self._resting)) != self._told:
            self._told = told
            self.frozen, self.unused, self.resting = map(self._numbers, told)

    def _indices(self, numbers: ParameterNumbers) -> frozenset[int]:
        known = set(numbers_in(numbers))
        return frozenset(index for index, place in enumerate(self._places) if place.number in known)

    def _numbers(self, indices: Iterable[int]) -> ParameterNumbers:
        return tuple(intervals(sorted(self._places[index].number for index in indices)))

    def _compare(self, user: UserCode) -> None:
        if self._of_step is None:
            self._of_step = self.frozen
        if self._resting_of_step is None:
            self._resting_of_step = self.resting
        for kind, own, first in (
            ("frozen", self.frozen, self._of_step),
            ("resting", self.resting, self._resting_of_step),
        ):
            if differ := set(numbers_in(own or ())) ^ set(numbers_in(first or ())):
                told = lanes_differ(self._places, min(differ), kind)
                raise user.error_of(RuntimeError(told), fatal=True)


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
