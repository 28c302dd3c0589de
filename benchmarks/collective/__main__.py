"""The collective strategy against its peers, as ratios within one run; a part of it with --parts.

    python -m benchmarks.collective [--parts exchange] [--members 2,4] [--mib 64] [--buckets 16] [--block-kib 1024] [--rounds 11]

exchange    gradients of --mib, no model: direct exchange with the code of trainers, and Gloo's all_reduce of the same gradients in --buckets

Rounds of all rows are interleaved, and ratios taken round by round: medians, and quartiles in brackets. All processes get memory as `trireme run` lets its
members have it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.collective import exchange
from shared.runtime import malloc


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="exchange")
    parser.add_argument("--members", default="2,4")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=16, help="of Gloo; ours are blocks of --block-kib")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", default=",".join(exchange.TITLES))
    given = parser.parse_args()
    os.environ.update(malloc.tunables(os.environ))
    right = True
    with tempfile.TemporaryDirectory() as folder:
        if "exchange" in given.parts.split(","):
            print(exchange.HEAD)
            for members in map(int, given.members.split(",")):
                names = given.rows.split(",")
                rows = exchange.measure(
                    names, members, given.mib, given.buckets, given.block_kib, given.rounds, Path(folder)
                )
                print(exchange.table(members, rows), flush=True)
                right = right and not any(row.wrong for row in rows)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
