"""The tables that a model's layers name, and what their rows come from at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer_agent.tables.embedding import TableLayer
from trainer_agent.tables.recording import Recording
from trainer_agent.tables.source import Bound, RowSource
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import MOST_TABLES, TableSpec
from trireme_shared.tables.grouping import Grouped
from trireme_shared.tables.hashing import table_seed


def layers_of(model: nn.Module) -> list[TableLayer]:
    """Each once."""
    return [module for module in model.modules() if isinstance(module, TableLayer)]


def tables_of(model: nn.Module, job_seed: int) -> tuple[TableSpec, ...]:
    """In the order of their names. Raises InvalidArgument: layers disagree about a table, or there are too many."""
    found: dict[str, TableSpec] = {}
    for layer in layers_of(model):
        spec = layer.spec
        other = found.setdefault(spec.name, spec)
        if other != spec:
            settings = "; ".join(f"{name} {one} and {two}" for name, one, two in other.differences(spec))
            msg = f"two layers use the table {spec.name} with different settings: {settings}"
            raise InvalidArgument(msg, hint="give one of them another name, or both the same settings")
    if len(found) > MOST_TABLES:
        raise InvalidArgument(f"the model has {len(found)} tables, at most {MOST_TABLES} are possible")
    return tuple(found[name].with_fields(seed=table_seed(job_seed, name)) for name in sorted(found))


class ModelTables:
    """The layers of a model, to be bound. `specs`: see tables_of; layers that come later are not seen."""

    def __init__(self, model: nn.Module, job_seed: int) -> None:
        self.specs = tables_of(model, job_seed)
        places = {spec.name: place for place, spec in enumerate(self.specs)}
        self._layers = [(layer, places[layer.spec.name]) for layer in layers_of(model)]

    def __repr__(self) -> str:
        return f"<ModelTables {', '.join(spec.name for spec in self.specs)}>"

    @property
    def source(self) -> RowSource | None:
        """What rows come from at the moment."""
        bound = self._layers[0][0].bound if self._layers else None
        return None if bound is None else bound.source

    def bind(self, source: RowSource | None) -> None:
        """Until the next call, rows come from there and have no gradients. None: from nowhere."""
        for layer, table in self._layers:
            layer.bound = None if source is None else Bound(source, table)

    @contextmanager
    def reading(self, source: RowSource) -> Iterator[None]:
        """In the block rows come from there and have no gradients."""
        with self._bound(source, None):
            yield

    @contextmanager
    def recording(
        self, source: RowSource, permit: Callable[[torch.Tensor], None] | None = None, named: Sequence[Grouped] = ()
    ) -> Iterator[Recording]:
        """In the block rows come from there, in whatever thread, and those that are looked up are recorded: for forward and backward of one
        minibatch. `permit`, `named`: see Recording."""
        recording = Recording(self.specs, permit, named)
        with self._bound(source, recording):
            yield recording

    @contextmanager
    def _bound(self, source: RowSource, recording: Recording | None) -> Iterator[None]:
        before = [layer.bound for layer, _ in self._layers]
        for layer, table in self._layers:
            layer.bound = Bound(source, table, recording)
        try:
            yield
        finally:
            for (layer, _), bound in zip(self._layers, before, strict=True):
                layer.bound = bound
