"""Images in a folder for each class, and the contents of image files as arrays, through Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Shard, as_column
from trireme_shared.datasets.dataset_files import ImageListing, list_images, root_of
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import ImageFolder

SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")


class ImageFolderReader:
    """Lists the folder with the first read."""

    def __init__(self, dataset: ImageFolder) -> None:
        self._size = dataset.image_size
        self._listing: ImageListing | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        root, digest = root_of(file)
        with self._lock:
            listing = self._listing = self._listing or list_images(root)
        if digest and listing.digest != digest:
            msg = f"{root} has other images than were counted: {len(listing.names)} here"
            raise DatasetError(
                msg, hint="the folder was changed, or is not the same everywhere: start a new job", url=root
            )
        chosen = listing.names[first : first + count]
        if len(chosen) < count:
            raise too_short(root, first, count, len(listing.names))
        found = []
        for name in chosen:
            url = files.join(root, name)
            with files.reading(url, "an image"):
                content = files.read_bytes(url)
            found.append(decoded(content, self._size, url, "the file"))
        labels = [listing.classes.index(name.partition("/")[0]) for name in chosen]
        return Shard({"image": as_column(found), "label": np.array(labels, dtype=np.int64)}, count)


def decoded(content: bytes, size: Sequence[int] | None, file: str, place: str) -> npt.NDArray[np.uint8]:
    """uint8 (3, height, width) in RGB; resized to `size` (height, width) if that is given. Raises
    DatasetError, which names `file` and the `place` in it."""
    image_module = _pillow(file)
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        msg = f"{file}: {place} is no image that can be read: {error}"
        raise DatasetError(
            msg, hint="remove or replace it, or read it as bytes (decode=False)", url=file
        ) from error
    if size is not None and (image.height, image.width) != tuple(size):
        image = image.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _pillow(file: str) -> Any:
    try:
        from PIL import Image  # noqa: PLC0415  only where images are read
    except ImportError as error:
        msg = f"{file} has images, and Pillow, which reads them, is not installed here"
        raise DatasetError(msg, hint="pip install 'trireme[images]' on all hosts", url=file) from error
    return Image
