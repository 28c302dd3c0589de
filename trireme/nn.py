"""Averages of parameters: `trireme.nn.Ema(module, 0.999)` (docs/buffers.md). Layers with rows on parameter
servers: `trireme.nn.Embedding("user", 16)`, `EmbeddingBag`; what steps their
rows; ids for texts; and how an exported model gets its rows in plain PyTorch (docs/embeddings.md). Needs
torch."""

from __future__ import annotations

from trainer_agent.model.averages import Ema
from trainer_agent.tables.embedding import SGD, Adagrad, Adam, Embedding, EmbeddingBag, Ftrl, ids_of
from trainer_agent.tables.files import load_tables, save_tables

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Ema",
    "Embedding",
    "EmbeddingBag",
    "Ftrl",
    "ids_of",
    "load_tables",
    "save_tables",
]
