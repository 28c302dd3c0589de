"""Folders that HF `datasets` saved with `save_to_disk`: their data files in order."""

from __future__ import annotations

import json
from typing import Any

from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError


def arrow_files(folder: str, split: str | None) -> list[str]:
    """Of a saved Dataset, or of the `split` of a saved DatasetDict. Raises DatasetError."""
    with files.reading(folder, "a saved dataset"):
        splits = _json(files.join(folder, "dataset_dict.json"))
        if splits is not None:
            names = ", ".join(map(str, splits["splits"]))
            if split not in splits["splits"]:
                said = f"has no split {split!r}" if split else "has several splits"
                msg = f"{folder} {said}; it has {names}"
                raise DatasetError(msg, hint='choose one: HuggingFace(folder, split="train")', url=folder)
            folder = files.join(folder, str(split))
        elif split is not None:
            msg = f"{folder} is one dataset (it has no dataset_dict.json), so it has no split {split!r}"
            raise DatasetError(msg, hint="leave split out", url=folder)
        state = _json(files.join(folder, "state.json"))
        if state is None:
            msg = f"{folder} is no saved dataset: it has no state.json"
            hint = "give a folder that dataset.save_to_disk(folder) wrote; Parquet files of a hub's dataset are read by Parquet"
            raise DatasetError(msg, hint=hint, url=folder)
        if state.get("_indices_data_files") or state.get("_indices_files"):
            msg = f"{folder} was saved with an order of rows beside them"
            raise DatasetError(msg, hint="save dataset.flatten_indices()", url=folder)
        return [files.join(folder, file["filename"]) for file in state["_data_files"]]


def _json(url: str) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        found: dict[str, Any] = json.loads(files.read_bytes(url))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found
