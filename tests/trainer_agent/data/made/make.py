"""The files of this folder, made by the formats' own libraries, which the tests do not need:

    pip install datasets==5.2.0 webdataset==1.0.2 tfrecord==1.14.6 pillow && python make.py

Record i of 24 has the id i, and an image of 4 x 6 pixels of value i where the format has images.
"""

from __future__ import annotations

import io
from pathlib import Path

import datasets
import numpy as np
import tfrecord
import webdataset
from PIL import Image

HERE = Path(__file__).parent
RECORDS = 24


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((4, 6, 3), number, dtype=np.uint8))


def png(number: int) -> bytes:
    content = io.BytesIO()
    picture(number).save(content, "png")
    return content.getvalue()


def make_tfrecord() -> None:
    writer = tfrecord.TFRecordWriter(str(HERE / "ids.tfrecord"))
    for i in range(RECORDS):
        values = {
            "id": (i, "int"),
            "x": ([i / 4, -i / 4, 0.5], "float"),
            "negative": (-i, "int"),
            "text": (f"record {i}".encode(), "byte"),
        }
        writer.write(values)
    writer.close()


def make_webdataset() -> None:
    with webdataset.TarWriter(str(HERE / "ids.tar"), mtime=0) as writer:
        for i in range(RECORDS):
            writer.write({"__key__": f"samples/{i:04}", "cls": i, "png": png(i)})


def make_hugging_face() -> None:
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "label": datasets.ClassLabel(names=["even", "odd"]),
            "matrix": datasets.Array2D((2, 3), "float32"),
            "image": datasets.Image(),
            "text": datasets.Value("string"),
        }
    )
    columns = {
        "id": list(range(RECORDS)),
        "label": [i % 2 for i in range(RECORDS)],
        "matrix": [np.full((2, 3), i, dtype=np.float32) for i in range(RECORDS)],
        "image": [picture(i) for i in range(RECORDS)],
        "text": [f"record {i}" for i in range(RECORDS)],
    }
    whole = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": whole}).save_to_disk(str(HERE / "ids_hf"), num_shards={"train": 2})


if __name__ == "__main__":
    make_tfrecord()
    make_webdataset()
    make_hugging_face()
