"""A job's script is found as a file of this host: from etcd by its digest, from a URL, or where its path
says."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import fsspec
import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from trireme.script_source import digests_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.local_script import LocalScripts, ScriptChanged
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import Source, stored_source

SOURCE = Source(file_name="train.py", text="print('ä')\n")


@pytest.fixture
def etcd() -> Etcd:
    return Etcd(SimulatedEtcd().transport("member"))


@pytest.fixture
def scripts(etcd: Etcd, tmp_path: Path) -> LocalScripts:
    return LocalScripts(etcd, "r", str(tmp_path / "sources"))


async def stored(etcd: Etcd, source: Source, digest: str) -> None:
    await etcd.put(ClusterKeys("r").source(digest), source.to_bytes())


async def test_a_script_in_etcd_becomes_a_file_once(etcd, scripts, tmp_path):
    await stored(etcd, SOURCE, SOURCE.digest)
    found = await scripts.find(SOURCE.script, {})
    assert found == tmp_path / "sources" / SOURCE.digest / "train.py"
    assert found.read_text() == SOURCE.text
    before = found.stat()
    assert await scripts.find(SOURCE.script, {}) == found
    assert found.stat().st_ino == before.st_ino
    assert [path.name for path in found.parent.iterdir()] == ["train.py"]


async def test_a_file_that_was_changed_is_written_again(etcd, scripts):
    await stored(etcd, SOURCE, SOURCE.digest)
    found = await scripts.find(SOURCE.script, {})
    found.write_text("import os; os.abort()")
    assert (await scripts.find(SOURCE.script, {})).read_text() == SOURCE.text


async def test_a_script_that_etcd_does_not_have_is_named(scripts):
    with pytest.raises(
        InvalidArgument, match=f"etcd has no script {SOURCE.script}: /r/sources/{SOURCE.digest} does"
    ):
        await scripts.find(SOURCE.script, {})


async def test_a_script_with_another_digest_is_refused(etcd, scripts, tmp_path):
    other = Source(file_name="train.py", text="print('evil')\n")
    await stored(etcd, other, SOURCE.digest)
    with pytest.raises(InvalidArgument, match=f"the digest {other.digest[:12]}, not {SOURCE.digest[:12]}"):
        await scripts.find(SOURCE.script, {})
    assert not (tmp_path / "sources").exists()


async def test_what_is_no_script_is_refused(etcd, scripts):
    await etcd.put(ClusterKeys("r").source(SOURCE.digest), b"{}")
    with pytest.raises(InvalidArgument, match="is no script"):
        await scripts.find(SOURCE.script, {})


@pytest.mark.parametrize(
    "script",
    ["source:", "source:abc/train.py", f"source:{'a' * 64}/../train.py", f"source:{'a' * 64}/x/y.py"],
)
async def test_a_source_that_names_none_is_refused(scripts, script):
    with pytest.raises(ValueError, match="names no source"):
        stored_source(script)
    with pytest.raises(InvalidArgument, match="names no source"):
        await scripts.find(script, {})


async def test_a_script_or_a_module_that_changed_since_the_job_was_created_is_not_run(scripts, tmp_path):
    script, module = tmp_path / "mine.py", tmp_path / "features.py"
    script.write_text("import features")
    module.write_text("")
    (tmp_path / "link.py").symlink_to(script)
    sources = digests_of(script)
    assert await scripts.find(str(script), sources) == script
    assert await scripts.find(str(tmp_path / "link.py"), sources) == tmp_path / "link.py"
    for path in (script, module):
        content = path.read_text()
        path.write_text(f"{content}\nimport os")
        with pytest.raises(
            ScriptChanged, match=f"{path} has changed since the job was created: its SHA-256 is"
        ):
            await scripts.find(str(script), sources)
        assert await scripts.find(str(script), {}) == script, "a job of an earlier version has no digests"
        path.write_text(content)
    module.unlink()
    with pytest.raises(ScriptChanged, match="unreadable"):
        await scripts.find(str(script), sources)


async def test_a_path_is_taken_as_it_is_and_a_missing_one_names_the_host(scripts, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("")
    assert await scripts.find(str(script), {}) == script
    with pytest.raises(
        InvalidArgument, match=f"there is no script {tmp_path}/other.py on host {socket.gethostname()}"
    ):
        await scripts.find(str(tmp_path / "other.py"), {})


async def test_a_script_at_a_url_is_read(scripts, tmp_path):
    fsspec.filesystem("memory").pipe_file("/scripts/far.py", b"x = 1\n")
    found = await scripts.find("memory://scripts/far.py", {})
    assert (found.name, found.read_text(), found.is_relative_to(tmp_path / "sources")) == (
        "far.py",
        "x = 1\n",
        True,
    )
    for url in ("memory://scripts/near.py", "memory://scripts/far.txt", "memory://scripts/.."):
        fsspec.filesystem("memory").pipe_file("/scripts/far.txt", b"x = 1\n")
        with pytest.raises(InvalidArgument, match=f"{url} cannot be read on host"):
            await scripts.find(url, {})


async def test_without_a_folder_scripts_are_private_to_the_user(etcd, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await stored(etcd, SOURCE, SOURCE.digest)
    found = await LocalScripts(etcd, "r").find(SOURCE.script, {})
    folder = tmp_path / f"trireme-sources-{os.getuid()}"
    assert found.is_relative_to(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(InvalidArgument, match="can be written by others"):
        await LocalScripts(etcd, "r").find(SOURCE.script, {})
