"""What the soak breaks below the processes: packets really vanish, disks are really full, and only in
namespaces of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import isolation

ENTER = "import sys; sys.argv = ['-c']; from tests.soak import isolation; isolation.enter()\n"


def inside(code: str, *arguments: str) -> str:
    """What `code` prints in new namespaces."""
    command = [sys.executable, "-c", ENTER + code, *arguments]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packets_to_a_port_are_dropped_and_counted_while_the_block_runs():
    if why := isolation.no_packets():
        pytest.skip(why)
    code = """
import socket, time
server, other = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
with isolation.DroppedPackets([port], 1.0) as all_of_them:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.3)
    except TimeoutError:
        print("silent")
    socket.create_connection(other.getsockname(), timeout=5)
socket.create_connection(("127.0.0.1", port), timeout=5).close()
peer, _ = server.accept()
client = socket.create_connection(("127.0.0.1", port))
accepted, _ = server.accept()
with isolation.DroppedPackets([port], 0.3) as some:
    for _ in range(60):
        accepted.send(b"x")
        time.sleep(0.001)
client.settimeout(20)
received = 0
while received < 60:
    received += len(client.recv(100))
print(all_of_them.count > 0, some.count > 0)
"""
    assert inside(code).split() == ["silent", "True", "True"]


def test_a_filled_disk_takes_no_byte_and_leaves_its_files_behind_when_it_is_released(tmp_path):
    if why := isolation.no_disks():
        pytest.skip(why)
    code = """
from pathlib import Path
disk = isolation.SmallDisk(Path(sys.orig_argv[-1]), 4)
(disk.folder / "logs").mkdir()
(disk.folder / "logs" / "a").write_text("kept")
(disk.folder / "etcd").mkdir()
disk.fill()
for again in range(2):
    try:
        (disk.folder / "more").write_text("x" * 10)
        print("written")
    except OSError as error:
        print(error.errno)
    (disk.folder / "more").unlink(missing_ok=True)
    if not again:
        (disk.folder / "logs" / "b").touch()
        disk.fill()
disk.empty()
(disk.folder / "more").write_text("x" * 10)
print(open("/proc/mounts").read().count(str(disk.folder)))
disk.release("etcd")
print(open("/proc/mounts").read().count(str(disk.folder)))
"""
    folder = tmp_path / "disk"
    assert inside(code, str(folder)).split() == ["28", "28", "1", "0"]
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"logs/a", "logs/b", "more"}
