"""A small GPT learns to write Python, byte by byte, from the standard library's own sources.

trireme run examples/charlm/charlm.py --trainers 2 --pservers 2       a cluster on this machine
python examples/charlm/charlm.py                                      one process, no services
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from corpus import prepare
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

DATA = Path(os.environ.get("CHARLM_DATA", Path(__file__).resolve().parent / "data"))
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 128, 96, 4, 2

config = trireme.Config(
    epochs=1, global_batch_size=32, lanes=4, seed=1, records_per_task=128, block_bytes=1 << 18
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def model():
    return GPT()


def dataset():
    return trireme.data.Bytes(str(prepare(DATA)["train"]), record_bytes=CONTEXT, overlap=1)


def evaluation_dataset():
    return trireme.data.Bytes(str(prepare(DATA)["valid"]), record_bytes=CONTEXT, overlap=1)


def loss(model, batch):
    text = batch["bytes"].long()
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)


def evaluate(model, batch):
    records = len(batch["bytes"])
    return {"loss": loss(model, batch) * records, "records": records}


def metrics(sums):
    mean = sums["loss"] / sums["records"]
    return {"loss": mean, "bits_per_byte": mean / math.log(2)}


if __name__ == "__main__":
    trireme.train(__name__)
