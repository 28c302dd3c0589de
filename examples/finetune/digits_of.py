"""What both scripts share: scikit-learn's digits, some of the ten classes, and the trunk of the network."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import trireme

DATA = Path(os.environ.get("FINETUNE_DATA", Path(__file__).resolve().parent / "data"))
TEST_EVERY = 5  # each fifth image is for evaluation


def trunk() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


def which(classes: Iterable[int], part: str) -> object:
    """The images of these classes; `part`: train or test. They are written on first use, the same each
    time."""
    chosen = sorted(classes)
    folder = DATA / f"{part}-{chosen[0]}-{chosen[-1]}"
    if not folder.exists():
        _write(folder, chosen, part)
    return trireme.data.Npy(f"{folder}/pixels.npy", f"{folder}/label.npy", aligned=True)


def _write(folder: Path, classes: list[int], part: str) -> None:
    """Whole or not at all, though several processes may do it at once."""
    pixels, label = load_digits(return_X_y=True)
    mine = np.isin(label, classes) & ((np.arange(len(label)) % TEST_EVERY == 0) == (part == "test"))
    DATA.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=DATA))
    np.save(made / "pixels.npy", (pixels[mine] / 16).astype(np.float32))
    np.save(made / "label.npy", label[mine].astype(np.int64))
    try:
        made.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(made)
