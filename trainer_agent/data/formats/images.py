"""Contents of image files as arrays, through Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.errors import DatasetError

SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")


def decoded(content: bytes, size: Sequence[int] | None, file: str, place: str) -> npt.NDArray[np.uint8]:
    """uint8 (3, height, width) in RGB; resized to `size` (height, width) if that is given. Raises DatasetError, which names `file`
    and the `place` in it."""
    image_module = _pillow(file)
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        msg = f"{file}: {place} is no image that can be read: {error}"
        raise DatasetError(msg, hint="remove or replace it, or read it as bytes (decode=False)", url=file) from error
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
