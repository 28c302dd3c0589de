"""Images in a folder for each class."""

from __future__ import annotations

from threading import Lock

import numpy as np

from trainer_agent.data.formats import images
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Shard, as_column
from trireme_shared.datasets.dataset_files import ImageListing, list_images, root_of
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import ImageFolder


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
            found.append(images.decoded(content, self._size, url, "the file"))
        labels = [listing.classes.index(name.partition("/")[0]) for name in chosen]
        return Shard({"image": as_column(found), "label": np.array(labels, dtype=np.int64)}, count)
