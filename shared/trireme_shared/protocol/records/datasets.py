"""What a dataset is, as data: users write `trireme.data.Parquet("train-*.parquet")`, the spec carries it, the
master counts its records once, trainers read ranges of it. No code travels, except by name in `Custom`.

Every reader yields *records*: a dict of column -> value. URLs are fsspec URLs or local paths; globs are
allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trireme_shared.protocol.records.record import UrlText

Size = Annotated[
    tuple[int, ...], Field(min_length=2, max_length=2)
]  # no pair: clients of TypeScript take those as lists in answers
ColumnTypes = dict[str, Literal["int64", "uint64", "float32", "float64", "bool", "string"]]
_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _needs_its_kind(schema: dict[str, Any]) -> None:
    """In JSON `kind` tells the readers apart, so no document may leave it out; in Python the class has it
    already."""
    schema["required"] = ["kind", *schema.get("required", [])]


class _Dataset(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_needs_its_kind)

    urls: tuple[UrlText, ...] = Field(min_length=1)
    names_code: ClassVar[bool] = False
    """URLs without a glob are the user's own words, not paths of files."""

    def __init__(self, *urls: str, **options: object) -> None:
        super().__init__(**({"urls": urls} if urls else {}), **options)

    # documents are read without it, so that `Record.from_bytes` decides about unknown fields here, too
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Parquet(_Dataset):
    """Rows of Parquet files; a task is a row range, a row group is read once. `columns`: a subset, default
    all."""

    kind: Literal["parquet"] = "parquet"
    columns: tuple[str, ...] | None = None


class Csv(_Dataset):
    """Rows of CSV files (RFC 4180, UTF-8) with a header line, or without one and with `column_names`.

    Types are found in the beginning of the first file: whole numbers int64 or uint64, other numbers float32
    or float64, bool, else text; `column_types` sets them where the beginning misleads. `columns`: a subset,
    default all. Quoted line breaks are respected, blank lines ignored.
    """

    kind: Literal["csv"] = "csv"
    column_names: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the columns of files without a header line; null: the files have one.",
    )
    column_types: ColumnTypes = Field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    delimiter: str = Field(
        default=",", pattern=r"^[\t !#-~]$", description="The character between two fields."
    )


class JsonLines(_Dataset):
    """One JSON object a line; blank lines are ignored. Types of columns are found and set as in Csv."""

    kind: Literal["json_lines"] = "json_lines"
    column_types: ColumnTypes = Field(default_factory=dict)


class TextLines(_Dataset):
    """One record a line: {"text": str} without the line break; an empty line is a record with empty text."""

    kind: Literal["text_lines"] = "text_lines"


class Bytes(_Dataset):
    """Fixed windows of files: record i of a file is {"bytes": uint8[record_bytes + overlap]} from i *
    record_bytes.

    `overlap` extra bytes follow each window (1 for next-byte prediction); a window that would pass the file's
    end is not a record.
    """

    kind: Literal["bytes"] = "bytes"
    record_bytes: int = Field(gt=0, lt=2**63, description="Bytes of one record.")
    overlap: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Bytes that follow each window and belong to the next one, too.",
    )


class Npy(_Dataset):
    """Rows (first axis) of .npy files, memory-mapped where they are local.

    `Npy("x.npy")` yields {"x": row}. `Npy("x.npy", "y.npy", aligned=True)` yields {"x": row, "y": row}: all
    files have the same number of rows and form one. Column names are the files' stems, unless `columns` names
    them (one name, or one for each aligned file; needed where several files that are not aligned have
    different stems).
    """

    kind: Literal["npy"] = "npy"
    aligned: bool = Field(
        default=False,
        description="All files have the same number of rows and form one record each, column by column.",
    )
    columns: tuple[str, ...] | None = None


class Custom(_Dataset):
    """`reader="pkg.mod:name"`: an object with count(url) -> int and read(url, first, count) -> iterator of
    records.

    Master and trainers import it, so it must be importable there. URLs without a glob reach it as they are
    written.
    """

    names_code: ClassVar[bool] = True

    kind: Literal["custom"] = "custom"
    reader: str = Field(pattern=_NAME)


_LOADER = (
    "The object is a torch.utils.data.DataLoader; the items are those of its dataset, and a minibatch is "
    "made by its collate_fn."
)


class _InCode(_Dataset):
    """`reader="pkg.mod:name"`: an object of the script or of a module that members can import, or a function
    without arguments that returns it. `urls` is that name again.

    An item is a record: a dict, or a tuple whose values `columns` names (else x and y), or one value (x).
    `records`: how many there are; None where the object has a length, or is counted by iterating it once.
    """

    names_code: ClassVar[bool] = True

    urls: tuple[UrlText, ...] = ()
    reader: str = Field(pattern=_NAME)
    records: int | None = Field(default=None, ge=0)
    columns: tuple[str, ...] | None = None

    def __init__(self, reader: str | None = None, **options: object) -> None:
        super().__init__(**({"reader": reader} if reader is not None else {}), **options)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return (
            {**given, "urls": (given["reader"],)} if isinstance(given, dict) and "reader" in given else given
        )


class MapStyle(_InCode):
    """Items of an object with `len(it)` and `it[number]`: a map-style `torch.utils.data.Dataset`, a list.

    Each trainer makes the object and reads the items of its tasks by number.
    """

    kind: Literal["map_style"] = "map_style"
    loader: bool = Field(default=False, description=_LOADER)

    @model_validator(mode="after")
    def _counted(self) -> MapStyle:
        if self.loader and (self.records is None or self.columns is not None):
            msg = "with loader=True records must be stated, and columns are none: dataset() states them"
            raise ValueError(msg)
        return self


class IterableStyle(_InCode):
    """Items of an object that can only be iterated, always the same in the same order: a torch
    `IterableDataset`, a dataset that Hugging Face's `datasets` streams, an object with `__iter__`.

    With `shards` the object has `shard(num_shards, index)`, and a task lies in one of them. A trainer keeps
    an iterator for each of its lanes, skips the items before its first task in a shard, and begins the shard
    anew for a task that lies behind.
    """

    kind: Literal["iterable_style"] = "iterable_style"
    shards: int = Field(
        default=1, ge=1, le=1_000_000, description="Parts of the object that can be iterated by themselves."
    )
    shard_records: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="Records of each shard; null: they are counted by iterating it once."
    )
    loader: bool = Field(default=False, description=_LOADER)

    @model_validator(mode="after")
    def _possible(self) -> IterableStyle:
        if self.shards > 1 and self.records is not None:
            raise ValueError("records is the length of one shard: leave it out, or state shard_records")
        if self.shard_records is not None and len(self.shard_records) != self.shards:
            raise ValueError(f"{len(self.shard_records)} shard_records and {self.shards} shards")
        if self.loader and self.columns is not None:
            raise ValueError("with loader=True columns are none")
        return self

    @property
    def stated(self) -> dict[str, int] | None:
        """Records by the name of the shard, if nobody has to count them."""
        counts = (self.records,) if self.shard_records is None else self.shard_records
        found = {name: n for name, n in zip(self.shard_names, counts, strict=False) if n is not None}
        return found if len(found) == self.shards else None

    @property
    def shard_names(self) -> tuple[str, ...]:
        """What the shards are called, in tables of files and in messages."""
        if self.shards == 1:
            return (self.reader,)
        return tuple(f"{self.reader} shard {number + 1} of {self.shards}" for number in range(self.shards))


class TFRecord(_Dataset):
    """Records of TFRecord files, read without TensorFlow; their checksums are compared.

    `decode="example"`: a `tf.train.Example`: feature -> array, or the value itself where there is one;
    features in `lists` stay arrays (of bytes: lists). `"bytes"`: {"bytes": the record as it is}.
    """

    kind: Literal["tfrecord"] = "tfrecord"
    decode: Literal["example", "bytes"] = "example"
    lists: tuple[str, ...] = Field(
        default=(), description="Features that stay lists where they have one value."
    )


class RecordIO(_Dataset):
    """{"bytes": record} of RecordIO files (chunks of records, plain, Snappy or gzip; their checksums are
    compared)."""

    kind: Literal["recordio"] = "recordio"


class WebDataset(_Dataset):
    """Samples of tar files: the files of one key follow each other, `000001.jpg 000001.cls` is {"__key__":
    "000001", "jpg", "cls"}.

    `decode`: images become uint8 (3, height, width), of `image_size` (height, width) if it is given; json,
    txt, cls and npy their values; others stay bytes. Without it all stay bytes.
    """

    kind: Literal["webdataset"] = "webdataset"
    decode: bool = True
    image_size: Size | None = None


class HuggingFace(_Dataset):
    """Rows of datasets that `datasets.Dataset.save_to_disk` wrote, read without that library:
    `HuggingFace("folder")`.

    `split`: of a saved DatasetDict. Columns of type Image become uint8 (3, height, width), of `image_size`
    (height, width) if it is given; with `decode=False` they stay as they are stored. `columns`: a subset,
    default all.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    split: str | None = Field(
        default=None, description="Part of a saved set of datasets; null: it is one dataset."
    )
    columns: tuple[str, ...] | None = None
    decode: bool = True
    image_size: Size | None = None


class ImageFolder(_Dataset):
    """Images below one folder, which has a folder for each class: {"image": uint8 (3, height, width),
    "label": int64}.

    Labels are places of the classes' names in their sorted order. Records are in an order that a hash of
    their names gives, so that classes are mixed. `image_size`: (height, width) that images are resized to.
    """

    urls: tuple[UrlText, ...] = Field(min_length=1, max_length=1)
    kind: Literal["image_folder"] = "image_folder"
    image_size: Size | None = None


Dataset = Annotated[
    Parquet
    | Csv
    | JsonLines
    | TextLines
    | Bytes
    | Npy
    | Custom
    | MapStyle
    | IterableStyle
    | TFRecord
    | RecordIO
    | WebDataset
    | HuggingFace
    | ImageFolder,
    Field(discriminator="kind"),
]
