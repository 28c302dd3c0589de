"""A committed checkpoint on storage: its manifest and its parts are read and checked here.

    {storage}/checkpoints/<uuid>/pserver-<i>.<token>.safetensors ...   one part per pserver that has blocks
                                 manifest-<md5>.json                   written once all parts are there

The names are unique per writer or per content, so a writer that was replaced cannot overwrite a committed
file. A checkpoint counts only once `checkpoints/latest` in etcd names it. Everything that reads here blocks.

BlockReader brings blocks with their optimizers' state out of a part, into memory of whoever loads it:

    sink(entry) names the memory for each tensor ─► the whole part is read and its checksum compared
        ─► loaded: blocks, in order
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

from pydantic import ValidationError

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.storage import files, tensor_file
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import BadFrame, CheckpointUnusable, InvalidArgument
from trireme_shared.protocol.records import JobSpec, SlotMap, TaskMeta
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, Manifest, PartLink
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, Block, Layout
from trireme_shared.protocol.records.record import misfits

if TYPE_CHECKING:
    import torch

MAX_MANIFEST_BYTES = 64 << 20
# trying again does not help
_DEFINITE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
# what may differ between the spec a checkpoint was made under and the one it is loaded under
ELASTIC = ("trainers", "pservers", "sources", "history")
_FREE = (*ELASTIC, "strategy")  # checkpoints of both strategies hold the same
M = TypeVar("M")


def checkpoint_uuid(job: str, timeline: int, slots_version: int, step: int) -> str:
    """The same at every pserver that writes a part."""
    return ids.named_uuid("checkpoint", job, timeline, slots_version, step)


def folder(storage_url: str, uuid: str) -> str:
    return files.join(storage_url, "checkpoints", uuid)


def spec_digest(spec: JobSpec) -> str:
    """The digest of the fields that may not change between a checkpoint and the job that goes on from it.
    Fields with their default are left out: a newer version may have more of them."""
    fixed = spec.model_dump(mode="json", exclude=set(_FREE), exclude_defaults=True)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def writers(layout: Layout, slots: SlotMap) -> tuple[int, ...]:
    """The pservers that have blocks or, if there are embedding tables, slots, in order: a complete checkpoint
    has a part of each."""
    count = sum(1 for _ in layout.blocks()) if not layout.tables else layout.slot_count
    return tuple(
        sorted(
            {
                slots.owners[slot_of(block, layout.slot_count)]
                for block in range(min(count, layout.slot_count))
            }
        )
    )


def manifest_name(content: bytes) -> str:
    return f"manifest-{hashlib.md5(content, usedforsecurity=False).hexdigest()}.json"


def unusable(ref: CheckpointRef, cause: str, error: BaseException | None = None) -> NoReturn:
    """Raises CheckpointUnusable."""
    msg = f"checkpoint {ref.uuid} (step {ref.step}) cannot be used: {cause}"
    raise CheckpointUnusable(msg, hint="the one before it is taken if there is one", uuid=ref.uuid) from error


def read_manifest(storage_url: str, job: str, ref: CheckpointRef) -> Manifest:
    """Read and check the manifest of a committed checkpoint (its parts are not looked at; `verify_parts`
    does).

    Raises CheckpointUnusable: missing, edited, truncated, or of another job or version; OSError: the storage
    failed.
    """
    url = files.join(folder(storage_url, ref.uuid), ref.manifest)
    try:
        if (size := files.size(url)) > MAX_MANIFEST_BYTES:
            unusable(ref, f"{url} has {size} bytes, at most {MAX_MANIFEST_BYTES} are expected")
        content = files.read_bytes(url)
    except (*_DEFINITE, InvalidArgument) as error:
        unusable(ref, f"{url} cannot be read: {error}", error)
    found = manifest_name(content)
    if found != ref.manifest:
        unusable(ref, _renamed(url, found))
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        unusable(ref, f"{url} is no manifest: {misfits(error)}", error)
    if wrong := misplaced(manifest, job, ref, url):
        unusable(ref, wrong)
    return manifest


def misplaced(manifest: Manifest, job: str, ref: CheckpointRef, where: str) -> str:
    """How a manifest that was read at `where` is of another checkpoint than `ref` of the job; "": it is of
    that one."""
    if (manifest.job, manifest.uuid, manifest.step, manifest.timeline) == (
        job,
        ref.uuid,
        ref.step,
        ref.timeline,
    ):
        return ""
    told = (
        f"{where} is of job {manifest.job!r}, checkpoint {manifest.uuid}, step {manifest.step}, "
        f"timeline {manifest.timeline}"
    )
    return f"{told}: expected job {job!r}, checkpoint {ref.uuid}, step {ref.step}, timeline {ref.timeline}"


def open_tasks(manifest: Manifest) -> dict[int, int]:
    """Task -> epoch of all training tasks that were open at an asynchronous checkpoint. Raises
    CheckpointUnusable."""
    names = [name.partition("/") for name in manifest.queue]
    try:
        epoch = TaskMeta.model_validate_json(manifest.queue["meta"]).epoch
    except (KeyError, ValidationError) as error:
        msg = (
            f"checkpoint {manifest.uuid} (step {manifest.step}) cannot be used: its queue cannot be "
            f"read: {error!r}"
        )
        raise CheckpointUnusable(msg) from error
    return {
        int(task): epoch for kind, _, task in names if kind in ("pending", "requeued") and task.isdecimal()
    }


def found(storage_url: str) -> tuple[list[CheckpointRef], list[str]]:
    """Every checkpoint, newest first, and the manifests that cannot be read; etcd is not asked. Raises
    OSError.

    The newest may not be named by `checkpoints/latest` in etcd yet; it is complete all the same.
    """
    there, unreadable = manifests(storage_url)
    return [ref for ref, _, _ in there], unreadable


def manifests(storage_url: str) -> tuple[list[tuple[CheckpointRef, Manifest, str]], list[str]]:
    """As `found`, with the manifests themselves, and what is wrong with their names ("": nothing). Of an
    object store two listings are asked for, by the thousand files, and each manifest once. Raises OSError."""
    folders = files.join(storage_url, "checkpoints")
    # a missing folder is empty, a missing bucket is told
    names = files.below(folders) if files.names(folders) else []
    places = [
        name for name in names if name.rpartition("/")[2].startswith("manifest-") and name.count("/") == 1
    ]
    urls = [files.join(storage_url, "checkpoints", place) for place in sorted(places)]
    there, unreadable = [], []
    for url in urls:
        try:
            content = files.read_bytes(url)
            manifest = Manifest.model_validate_json(content)
        except FileNotFoundError:
            continue  # it was deleted meanwhile
        except ValidationError:
            unreadable.append(url)
            continue
        uuid, name = url.split("/")[-2:]
        facts = {"step": manifest.step, "timeline": manifest.timeline, "on": manifest.on}
        ref, called = CheckpointRef(uuid=uuid, manifest=name, **facts), manifest_name(content)
        there.append((ref, manifest, "" if called == name else _renamed(url, called)))
    return sorted(
        there, key=lambda one: (one[0].timeline, one[0].step, one[0].manifest), reverse=True
    ), unreadable


def _renamed(url: str, called: str) -> str:
    return f"{url} was changed after it was written: its content now belongs to {called}"


def read_part(
    storage_url: str, ref: CheckpointRef, part: CheckpointPart | PartLink, sink: tensor_file.Sink
) -> tensor_file.Summary:
    """Read one part, or one that it builds on, into the memory that `sink` names; the values may be used only
    if this returns.

    Raises CheckpointUnusable: missing, truncated, changed, or not of this checkpoint; OSError: the storage
    failed.
    """
    uuid = part.uuid if isinstance(part, PartLink) else ref.uuid
    url = files.join(folder(storage_url, uuid), part.file)
    checksum = part.checksum.partition(":")[0]
    if checksum not in tensor_file.CHECKSUMS:
        known = ", ".join(tensor_file.CHECKSUMS)
        unusable(
            ref,
            f"{url} was written with a checksum {checksum!r}, which this version does not know (it "
            f"knows {known})",
        )
    try:
        if (size := files.size(url)) != part.bytes:
            unusable(ref, f"{url} has {size} bytes, {part.bytes} were written")
        found = tensor_file.read(url, sink, checksum)
    except (*_DEFINITE, InvalidArgument, BadFrame) as error:
        builds = ", on which it builds," if uuid != ref.uuid else ""
        unusable(ref, f"{url}{builds} cannot be read: {error}", error)
    if not is_intact(found, part):
        unusable(ref, f"{url} has checksum {found.checksum}, {part.checksum} was written")
    if found.metadata.get("uuid") != uuid:
        unusable(ref, f"{url} is of checkpoint {found.metadata.get('uuid')}")
    return found


class StatesRead(Protocol):
    """Where the state of an optimizer is read to."""

    def into(self, block: int, name: str) -> memoryview | None:
        """Memory for a tensor of a block's state, writable; None: it is not wanted."""
        ...

    def lacking(self) -> tuple[int, str] | None:
        """Once all is read: block and name of a tensor that did not come and is needed."""
        ...


def read_values(
    storage_url: str,
    ref: CheckpointRef,
    manifest: Manifest,
    memory: Callable[[int], memoryview],
    states: StatesRead | None = None,
) -> None:
    """The values of every block into `memory(block)`, and of the optimizer's state what `states` has memory
    for. Raises as `read_part`, also if something that `states` needs is not there."""
    missing = {block.number for block in manifest.layout.blocks()}

    def place(entry: tensor_file.Entry) -> memoryview | None:
        _, number, state = [*entry.name.split(".", 2), "", ""][:3]
        if state and number.isdecimal():
            into = states.into(int(number), state) if states is not None else None
            if into is not None and into.nbytes != math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]:
                unusable(
                    ref,
                    f"{state} of block {number} has {entry.shape} {entry.dtype}, {into.nbytes} "
                    "bytes are expected",
                )
            return into
        if state or not number.isdecimal() or int(number) not in missing:
            return None
        missing.remove(int(number))
        return memory(int(number))

    for part in manifest.parts:
        read_part(storage_url, ref, part, place)
    if missing:
        unusable(ref, f"it lacks {len(missing)} blocks, the first is {min(missing)}")
    if states is not None and (lacking := states.lacking()) is not None:
        block, name = lacking
        unusable(
            ref,
            f"it has no state of the optimizer ({name} of block {block}): before the first step there is "
            "none",
        )


def is_intact(read: tensor_file.Summary, part: CheckpointPart | PartLink) -> bool:
    return read.checksum == part.checksum


def verify_parts(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, good: MutableSet[PartLink] | None = None
) -> int:
    """Read every part, and all that they build on; the bytes of these files together. `good`: files that were
    read before are not read again, and these are added. Raises CheckpointUnusable at the first that is not as
    it was written."""
    good = set() if good is None else good
    for part in manifest.parts:
        for link in (part.link(ref.uuid), *reversed(part.chain)):
            if link not in good:
                read_part(storage_url, ref, link, lambda _: None)
                good.add(link)
    return sum(manifest.files.values())


@dataclass(slots=True)
class _Loading(Generic[M]):
    """One block that is being read."""

    place: Block
    values: M | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class BlockReader(Generic[M]):
    """Of these blocks in one part. torch is imported when one is read: the master, which reads manifests, has
    no use for it. `take(block)`: memory for its values, and their bytes, writable. States get memory of their
    own."""

    def __init__(
        self, ref: CheckpointRef, blocks: Mapping[int, Block], take: Callable[[Block], tuple[M, memoryview]]
    ) -> None:
        self._ref, self._take = ref, take
        self._loading: dict[int, _Loading[M]] = {number: _Loading(block) for number, block in blocks.items()}

    def sink(self, entry: Entry) -> memoryview | None:
        """Memory for a tensor; None: it is of no block that is wanted. Raises CheckpointUnusable: it has
        another form."""
        import torch  # noqa: PLC0415

        from trireme_shared.blocks.buffers import DTYPES, bytes_of  # noqa: PLC0415

        _, number, name = [*entry.name.split(".", 2), "", ""][:3]
        item = self._loading.get(int(number)) if number.isdecimal() else None
        if item is None:
            return None
        if not name:
            if entry.dtype != item.place.dtype or entry.shape != (item.place.elements,):
                wanted = f"block {number} of {item.place.elements} {item.place.dtype}"
                unusable(self._ref, f"it lacks {wanted}: it has {entry.shape} {entry.dtype}")
            item.values, view = self._take(item.place)
            return view
        if entry.shape not in ((), (item.place.elements,)):
            wanted = f"{name} of block {number} for {item.place.elements} elements"
            unusable(self._ref, f"it lacks {wanted}: it has {entry.shape}")
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        item.state[name] = tensor
        return bytes_of(tensor.reshape(-1))

    def loaded(self, file: str) -> Iterator[tuple[int, M, dict[str, torch.Tensor]]]:
        """Each block, once the part `file` was read as a whole. Raises CheckpointUnusable: one is missing."""
        for number, item in sorted(self._loading.items()):
            if item.values is None:
                unusable(self._ref, f"it lacks block {number} in {file}")
            yield number, item.values, item.state


def check_model(manifest: Manifest, ref: CheckpointRef, digest: str) -> None:
    """Raises CheckpointUnusable if the checkpoint is not of the model with that digest."""
    if manifest.layout.digest != digest:
        msg = (
            f"checkpoint {ref.uuid} is of model {manifest.layout.digest[:12]}, the job's model is "
            f"{digest[:12]}: "
            "names, shapes or dtypes of its parameters differ"
        )
        raise CheckpointUnusable(
            msg, hint="go on with the script the checkpoint was made with, or start a new job"
        )
