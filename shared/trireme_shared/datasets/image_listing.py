"""Images in a folder for each class, in one order that master and trainers find alike, each for itself.

root/cat/1.jpg root/dog/2.jpg ──sorted by a hash of the name──► names, classes, digest of all names
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
MOST_IMAGES = 10_000_000
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageListing:
    """`names`: relative to the root, in the order of records; `classes`: sorted; `digest`: of all names."""

    names: list[str]
    classes: list[str]
    digest: str

    def stamped(self, root: str) -> str:
        """The root's name in a file table: a folder that is changed later has another one."""
        return f"{root}#{self.digest}"


def list_images(root: str) -> ImageListing:
    """About 150 bytes an image. Raises DatasetError if there are no folders with images, or more than MOST_IMAGES."""
    with files.reading(root, "a folder of images"):
        found = [name for name in files.below(root) if name.lower().endswith(SUFFIXES) and "/" in name]
    if not found:
        msg = f"{root} has no folders with images ({' '.join(suffix[1:] for suffix in SUFFIXES)})"
        raise DatasetError(msg, hint="a class is a folder: root/cat/1.jpg, root/dog/2.jpg", url=root)
    if len(found) > MOST_IMAGES:
        msg = f"{root} has {len(found)} images; each trainer lists at most {MOST_IMAGES}"
        raise DatasetError(msg, hint="pack them into tar files: trireme.data.WebDataset", url=root)
    order = sorted(
        (hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), name) for name in found
    )
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for hashed, _ in order:
        whole.update(hashed)
    classes = sorted({name.partition("/")[0] for name in found})
    return ImageListing([name for _, name in order], classes, whole.hexdigest())


def root_of(file: str) -> tuple[str, str]:
    """(root, digest) of what `stamped` gave; digest "" of a root alone."""
    root, _, digest = file.rpartition("#")
    if root and len(digest) == 2 * _DIGEST_BYTES and set(digest) <= set("0123456789abcdef"):
        return root, digest
    return file, ""
