"""In a network namespace of its own: the connection of a watch is dropped without a word, all others work.

unshare --net python -m tests.shared.platform.etcd.dead_connection FOLDER
    prints how long the watch took to notice it
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import psutil

from tests.shared.platform.etcd.test_endpoints import etcd_process
from trireme_shared.platform.etcd import connect, etcd3_transport
from trireme_shared.platform.etcd.embedded import free_ports
from trireme_shared.platform.runtime import clock

LIMIT_S = 12.0


def ports_to(port: int) -> set[int]:
    return {
        each.laddr.port
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.raddr.port == port
    }


async def main(folder: Path) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    etcd3_transport.KEEPALIVE_S.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2)
    port, peer_port = free_ports(2)
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    async with etcd_process(folder, "n", url, peer, f"n={peer}", progress_s=None):
        client = connect([url])
        await client.get("/a", timeout_s=10)
        before = ports_to(port)
        async with aclosing(client.watch("/a", start_revision=1)) as batches:
            following = asyncio.ensure_future(anext(batches))
            while not (watching := ports_to(port) - before):
                await asyncio.sleep(0.02)
            for match in ("--sport", "--dport"):
                rule = ["-p", "tcp", match, str(*watching), "-j", "DROP"]
                subprocess.run(["iptables", "-A", "INPUT", *rule], check=True)
            begun = clock.monotonic()
            await client.put("/a", b"1")
            async with asyncio.timeout(LIMIT_S):
                batch = await following
        assert [event.kv.value for event in batch.events] == [b"1"]
        sys.stdout.write(f"noticed after {clock.monotonic() - begun:.1f} s\n")
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
