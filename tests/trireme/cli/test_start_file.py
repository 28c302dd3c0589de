"""`--init-from JOB[@STEP]`: the file of parameters that it means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.trainer_agent.scripts import spec_for, write_script
from trireme.cli import start_file
from trireme.cli.start_file import with_start_file
from trireme.settings import Setting
from trireme_shared.protocol.errors import NotFound


def meant(text: str, folder) -> str:
    return str(with_start_file({"init_from": Setting(text, "--init-from")}, folder)["init_from"].value)


def test_a_completed_job_means_its_exported_model(tmp_path):
    spec = spec_for(write_script(tmp_path), job="pretrain", storage=str(tmp_path / "pretrain"))
    (tmp_path / "pretrain" / "export").mkdir(parents=True)
    (tmp_path / "pretrain" / "spec.json").write_bytes(spec.to_bytes())
    model = tmp_path / "pretrain" / "export" / "model.safetensors"
    with pytest.raises(NotFound, match="no checkpoint"):
        meant("pretrain", tmp_path)
    model.write_bytes(b"")
    assert meant("pretrain", tmp_path) == str(model)
    assert meant("Pretrain_", tmp_path) == str(model), "as the command that began it takes that name"
    with pytest.raises(NotFound, match="no checkpoint 40"):
        meant("pretrain@40", tmp_path)


def test_paths_and_urls_stay(tmp_path):
    for text in ("model.pt", "folder/model.safetensors", "s3://bucket/model.safetensors"):
        assert meant(text, tmp_path) == text
    assert with_start_file({}, tmp_path) == {}


def test_an_unknown_job_is_said(tmp_path):
    with pytest.raises(NotFound, match="holds no run of job missing") as told:
        meant("missing", tmp_path)
    assert "a job of this folder or cluster, or a file" in told.value.hint


def test_the_manifest_that_names_the_tables_is_read_once(tmp_path, monkeypatch):
    """An export without rows of a table that the checkpoint has: the checkpoint is exported instead."""
    spec = spec_for(write_script(tmp_path), job="pretrain", storage=str(tmp_path / "pretrain"))
    (tmp_path / "pretrain" / "export").mkdir(parents=True)
    (tmp_path / "pretrain" / "spec.json").write_bytes(spec.to_bytes())
    (tmp_path / "pretrain" / "export" / "model.safetensors").write_bytes(b"")
    ref, reads, exports = SimpleNamespace(uuid="d0c5"), [], []
    manifest = SimpleNamespace(layout=SimpleNamespace(tables=[SimpleNamespace(name="users")]))
    monkeypatch.setattr(start_file, "choose", lambda *_: ref)
    monkeypatch.setattr(start_file.stored, "read_manifest", lambda *given: reads.append(given) or manifest)
    monkeypatch.setattr(start_file, "_export", lambda job, uuid, *_, **__: exports.append((job, uuid)))
    exported = str(tmp_path / "pretrain" / "export-d0c5" / "model.safetensors")
    assert meant("pretrain", tmp_path) == exported
    assert (len(reads), exports) == (1, [("pretrain", "d0c5")])
