"""Layers with rows on parameter servers: `trireme.nn.Embedding("user", 16)`, `EmbeddingBag`; what steps their rows; ids for texts; and how
an exported model gets its rows in plain PyTorch (docs/embeddings.md). Needs torch."""

from __future__ import annotations

from trainer_agent.tables.deltas import load_tables
from trainer_agent.tables.embedding import Embedding, EmbeddingBag
from trainer_agent.tables.files import save_tables
from trainer_agent.tables.ids import ids_of
from trainer_agent.tables.settings import SGD, Adagrad, Adam, Ftrl

__all__ = ["SGD", "Adagrad", "Adam", "Embedding", "EmbeddingBag", "Ftrl", "ids_of", "load_tables", "save_tables"]
