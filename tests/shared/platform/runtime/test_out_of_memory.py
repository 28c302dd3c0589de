"""What control groups say of processes that the kernel has killed because memory was short."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equipment.memory_groups import memory_group
from tests.equipment.virtual_loop import run_virtually
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.out_of_memory import MemoryGroup, MemoryKills, in_words

GIB = 1 << 30


def version_2(mount: Path, path: str, kills: int, **numbers: int | str) -> Path:
    folder = mount / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 3\noom_kill {kills}\n")
    for name, value in numbers.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")
    return folder


def version_1(mount: Path, path: str, kills: int, limit: int, used: int) -> Path:
    folder = mount / "memory" / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
    (folder / "memory.oom_control").write_text(control)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.max_usage_in_bytes").write_text(f"{used}\n")
    return folder


def own(folder: Path, text: str) -> Path:
    file = folder / "cgroup"
    file.write_text(text)
    return file


def test_a_kill_is_told_with_the_narrowest_limit_around(tmp_path: Path) -> None:
    version_2(tmp_path, "/", 0)
    version_2(tmp_path, "/pod", 0, max=4 * GIB, peak=4 * GIB - 100_000_000)
    version_2(tmp_path, "/pod/trainer", 0, max="max")
    kills = MemoryKills(MemoryGroup.own(own(tmp_path, "0::/pod/trainer\n"), tmp_path))
    assert kills.claim() == ""
    version_2(tmp_path, "/pod/trainer", 2)
    assert [kills.claim() for _ in range(3)] == [
        "out of memory (limit 4 GiB, 3.9 GiB used)",
        "out of memory (limit 4 GiB, 3.9 GiB used)",
        "",
    ], "as many deaths as kills"


def test_kills_of_others_are_not_taken_for_those_of_ones_own_children(tmp_path: Path) -> None:
    """A launcher took those in its host agents for those of its masters, which it then gave up when they were
    killed by hand."""

    async def main() -> None:
        folder = version_2(tmp_path, "/", 0)
        kills = MemoryKills(MemoryGroup((folder,)))
        version_2(tmp_path, "/", 5)  # of other processes
        with kills.watched():
            await asyncio.sleep(40)
        assert kills.claim() == "", "they were long ago"
        version_2(tmp_path, "/", 6)
        kills.look()
        await asyncio.sleep(1)
        started = clock.monotonic()
        assert kills.claim(started) == "", "that was before the child was started"
        await asyncio.sleep(1)
        version_2(tmp_path, "/", 7)
        assert kills.claim(started) == "out of memory"
        assert kills.claim(started) == ""

    run_virtually(main)


def test_version_1_of_control_groups_says_it_too(tmp_path: Path) -> None:
    version_1(tmp_path, "/docker/1a", 5, 512 << 20, 500 << 20)
    text = "5:cpu,cpuacct:/docker/1a\n4:memory:/docker/1a\n0::/docker/1a\n"
    kills = MemoryKills(MemoryGroup.own(own(tmp_path, text), tmp_path))
    assert kills.claim() == "", "those before are not of our children"
    version_1(tmp_path, "/docker/1a", 6, 512 << 20, 500 << 20)
    assert kills.claim() == "out of memory (limit 512 MiB, 500 MiB used)"


def test_a_container_finds_its_group_where_it_is_mounted(tmp_path: Path) -> None:
    """The path is that of the host, which the container does not see."""
    version_1(tmp_path, "/", 0, 2 * GIB, GIB)
    kills = MemoryKills(MemoryGroup.own(own(tmp_path, "4:memory:/docker/of-the-host\n"), tmp_path))
    version_1(tmp_path, "/", 1, 2 * GIB, GIB)
    assert kills.claim() == "out of memory (limit 2 GiB, 1 GiB used)"


def test_without_a_limit_the_kill_alone_is_told(tmp_path: Path) -> None:
    version_1(tmp_path, "/", 0, 9223372036854771712, GIB)
    kills = MemoryKills(MemoryGroup.own(own(tmp_path, "4:memory:/\n"), tmp_path))
    version_1(tmp_path, "/", 1, 9223372036854771712, GIB)
    assert kills.claim() == "out of memory"


@pytest.mark.parametrize("text", ["", "garbage\n", "0::/nowhere\n"])
def test_where_nothing_is_known_nothing_is_said(tmp_path: Path, text: str) -> None:
    group = MemoryGroup.own(own(tmp_path, text), tmp_path)
    assert str(group) == ""
    assert MemoryKills(group).claim() == ""


def test_sizes_are_in_words() -> None:
    assert [in_words(size) for size in (4 * GIB, GIB + GIB // 2, 512 << 20)] == [
        "4 GiB",
        "1.5 GiB",
        "512 MiB",
    ]


GREEDY = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"


@pytest.mark.processes
def test_the_kernels_own_kill_is_found() -> None:
    with memory_group(64 << 20) as small:
        if small is None:
            pytest.skip("no control group can be made here")
        kills = MemoryKills(small.group)
        enters = f"open({str(small.procs)!r}, 'w').write(str(__import__('os').getpid()))\n"
        ended = subprocess.run([sys.executable, "-c", enters + GREEDY], check=False, timeout=60)
        assert ended.returncode == -signal.SIGKILL
        told = kills.claim()
        assert told.startswith("out of memory (limit 64 MiB, ")
        assert kills.claim() == ""
