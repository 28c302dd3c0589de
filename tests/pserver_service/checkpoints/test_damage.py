"""Whatever is wrong with a checkpoint's files is found before anything of them is used, and the message says
what."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.pserver_service.checkpoints import parts
from trireme_shared.checkpoints import stored, writer
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records.checkpoints import Manifest

EVERY_4 = Schedule(every_steps=4, every_epochs=None, epochs=9)


@pytest.fixture
def saved(tmp_path):
    """(storage, ref, folder) of a checkpoint of two parameter servers."""
    layout = parts.layout_of()
    stores = parts.fresh(layout, 2, EVERY_4)
    parts.train(layout, stores, 0, 4)
    ref = parts.save(str(tmp_path), layout, parts.snapshots(stores), parts.slot_map(2))
    return str(tmp_path), ref, Path(stored.folder(str(tmp_path), ref.uuid))


def refused(saved, **arguments):
    storage, ref, _ = saved
    with pytest.raises(CheckpointUnusable) as caught:
        parts.load(storage, ref, 2, **arguments)
    assert f"checkpoint {ref.uuid}" in caught.value.message
    return caught.value.message


def test_one_bit_that_flipped(saved):
    part = saved[2] / "pserver-1.x.safetensors"
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    message = refused(saved)
    assert "has checksum" in message
    assert "was written" in message


@pytest.mark.parametrize("checksum", ["md5", "sha256"])
def test_the_checksum_that_a_checkpoint_names_is_the_one_that_is_compared(tmp_path, checksum):
    layout = parts.layout_of()
    stores = parts.fresh(layout, 2, EVERY_4)
    parts.train(layout, stores, 0, 4)
    ref = parts.save(str(tmp_path), layout, parts.snapshots(stores), parts.slot_map(2), checksum=checksum)
    assert parts.load(str(tmp_path), ref, 2)
    folder = Path(stored.folder(str(tmp_path), ref.uuid))
    manifest = stored.read_manifest(str(tmp_path), parts.JOB, ref)
    part = folder / "pserver-1.x.safetensors"
    assert manifest.parts[1].checksum == f"{checksum}:{hashlib.new(checksum, part.read_bytes()).hexdigest()}"
    test_one_bit_that_flipped((str(tmp_path), ref, folder))


def test_a_checksum_that_is_not_known_is_named(saved):
    storage, ref, _ = saved
    manifest = stored.read_manifest(storage, parts.JOB, ref)
    newer = tuple(part.model_copy(update={"checksum": "blake4:00"}) for part in manifest.parts)
    name = writer.write_manifest(storage, manifest.model_copy(update={"parts": newer}))
    message = refused((storage, ref.model_copy(update={"manifest": name}), None))
    assert "checksum 'blake4', which this version does not know (it knows xxh3-128, md5, sha256)" in message


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -1])
def test_a_part_that_ends_too_early(saved, kept):
    part = saved[2] / "pserver-0.x.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:kept])
    assert f"{len(content)} were written" in refused(saved)


def test_a_part_that_is_missing(saved):
    (saved[2] / "pserver-0.x.safetensors").unlink()
    assert "cannot be read" in refused(saved)


def test_a_part_of_another_checkpoint(saved, tmp_path):
    storage, ref, folder = saved
    layout = parts.layout_of()
    stores = parts.fresh(layout, 2, EVERY_4)
    parts.train(layout, stores, 0, 8)
    parts.save(storage, layout, parts.snapshots(stores), parts.slot_map(2), uuid="u2")
    other = tmp_path / "checkpoints" / "u2" / "pserver-1.x.safetensors"
    (folder / "pserver-1.x.safetensors").write_bytes(other.read_bytes())
    assert "checksum" in refused((storage, ref, folder))


def test_a_manifest_that_is_missing(saved):
    (saved[2] / saved[1].manifest).unlink()
    assert "cannot be read" in refused(saved)


def test_a_manifest_that_was_edited(saved):
    manifest = saved[2] / saved[1].manifest
    manifest.write_text(manifest.read_text().replace('"step":4', '"step":5'))
    assert "was changed after it was written" in refused(saved)


def test_a_manifest_cut_short(saved):
    manifest = saved[2] / saved[1].manifest
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert "was changed after it was written" in refused(saved)


def test_a_checkpoint_of_another_job(saved):
    storage, ref, folder = saved
    content = (folder / ref.manifest).read_bytes().replace(b'"job":"ctr"', b'"job":"other"')
    (folder / stored.manifest_name(content)).write_bytes(content)
    message = refused((storage, ref.model_copy(update={"manifest": stored.manifest_name(content)}), folder))
    assert "job 'other'" in message
    assert "expected job 'ctr'" in message


def test_a_checkpoint_of_another_model(saved):
    assert "names, shapes or dtypes of its parameters differ" in refused(saved, digest="changed-since")


def test_a_manifest_that_lacks_a_part(saved):
    storage, ref, folder = saved
    manifest = Manifest.model_validate_json((folder / ref.manifest).read_bytes())
    content = manifest.model_copy(update={"parts": manifest.parts[:1]}).to_bytes()
    name = stored.manifest_name(content)
    (folder / name).write_bytes(content)
    assert "lacks part of pserver-1" in refused((storage, ref.model_copy(update={"manifest": name}), folder))


def test_verify_reads_every_part(saved):
    storage, ref, folder = saved
    manifest = stored.read_manifest(storage, parts.JOB, ref)
    assert stored.verify_parts(storage, ref, manifest) == sum(
        path.stat().st_size for path in folder.glob("pserver-*")
    )
    (folder / "pserver-1.x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointUnusable):
        stored.verify_parts(storage, ref, manifest)
