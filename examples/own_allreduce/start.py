"""Starts an etcd and some processes of digits_allreduce.py on this machine, and, if it is told to, harms them.

python examples/own_allreduce/start.py --members 3
python examples/own_allreduce/start.py --members 3 --steps 2000 --kill-after 3 --freeze-after 5 --join-after 8
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

from shared.etcd.embedded import EmbeddedEtcd

LOOP = Path(__file__).with_name("digits_allreduce.py")


async def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedEtcd(folder) as etcd:
            environment = os.environ | {"TRIREME_ETCD": etcd.url, "TRIREME_JOB": "digits", "STEPS": str(given.steps)}

            async def start() -> asyncio.subprocess.Process:
                return await asyncio.create_subprocess_exec(sys.executable, str(LOOP), env=environment)

            async def harm(after: float, place: int, number: signal.Signals) -> None:
                if after:
                    await asyncio.sleep(after)
                    if members[place].returncode is None:
                        print(f"member {place} gets {number.name}", flush=True)
                        members[place].send_signal(number)

            async def join(after: float) -> None:
                if after:
                    await asyncio.sleep(after)
                    print("another member joins", flush=True)
                    members.append(await start())

            members = [await start() for _ in range(given.members)]
            await asyncio.gather(
                harm(given.kill_after, 0, signal.SIGKILL),
                harm(given.freeze_after, 1, signal.SIGSTOP),
                join(given.join_after),
            )
            codes = [
                await member.wait() for place, member in enumerate(members) if not (given.freeze_after and place == 1)
            ]
            if given.freeze_after:
                members[1].kill()  # it is frozen still
                await members[1].wait()
            return max(code for place, code in enumerate(codes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-after", type=float, default=0, metavar="SECONDS", help="of the first member")
    parser.add_argument("--freeze-after", type=float, default=0, metavar="SECONDS", help="of the second member")
    parser.add_argument("--join-after", type=float, default=0, metavar="SECONDS")
    sys.exit(asyncio.run(main(parser.parse_args())))
