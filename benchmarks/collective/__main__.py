"""The collective strategy against its peers, as ratios within one run; a part of it with --parts.

    python -m benchmarks.collective [--parts exchange,jobs,tables,joining,rebuilds,kills] [--members 2,4]
                                    [--rounds 11] [--mib 64] [--buckets 16] [--block-kib 1024]
                                    [--models charlm,mlp] [--seconds 3] [--rebuilds 200]
                                    [--table-models deepfm,clicks] [--table-rows 1000000]
                                    [--table-ways ddp,ours,...] [--no-losses]
                                    [--joining 1,2] [--state-mib 256] [--joins 5] [--apart both]
                                    [--kills 100] [--freezes 20] [--instants 250] [--gloo-kills 250]
                                    [--within-s 3600] [--seed 1]

exchange    gradients of --mib, no model: direct exchange with the code of trainers, and Gloo's all_reduce of
            the same gradients in --buckets
jobs        steps/s of whole jobs, and of DistributedDataParallel at its best with the same model, global
            batch and threads
tables      samples/s of jobs with embedding tables, two trainers: collective, one and two parameter servers,
            DistributedDataParallel
joining     what a trainer that joins with --state-mib of parameters and momentum costs the others, of which
            there are --joining
rebuilds    what so many generations leave behind: a trainer is killed again and again
kills       of four trainers one is killed (--kills) or frozen (--freezes): the others' next step; killed at
            random instants (--instants, with spares beside them; --gloo-kills of processes in a plain
            all_reduce): whether survivors have the same versions, with the bits of a job left alone

Rounds of all rows are interleaved, and ratios taken round by round: medians, and quartiles in brackets. All
processes get memory as `trireme run` lets its members have it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from benchmarks.collective import exchange, jobs, joining, kills, rebuilds, tables
from trireme_shared.platform.runtime import process_setup, telemetry


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="exchange,jobs,tables,joining,rebuilds,kills")
    parser.add_argument("--members", default="2,4")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--buckets", type=int, default=16, help="of Gloo; ours are blocks of --block-kib")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", default=",".join(exchange.TITLES))
    parser.add_argument("--models", default="charlm,mlp")
    parser.add_argument("--seconds", type=float, default=3.0, help="of jobs: measured per row and round")
    parser.add_argument("--table-models", default="deepfm,clicks")
    parser.add_argument("--table-rows", type=int, default=1_000_000, help="of clicks")
    parser.add_argument("--table-ways", default=",".join(tables.TITLES))
    parser.add_argument(
        "--no-losses", action="store_true", help="of tables: do not look whether all learn the same"
    )
    parser.add_argument("--rebuilds", type=int, default=200)
    parser.add_argument("--joining", default="1,2", help="of joins: members before")
    parser.add_argument("--state-mib", type=int, default=256)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument(
        "--apart",
        choices=["both", "yes", "no"],
        default="both",
        help="joins: the joiner has a processor of its own",
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--instants", type=int, default=250)
    parser.add_argument("--gloo-kills", type=int, default=250)
    parser.add_argument(
        "--within-s", type=float, default=3600.0, help="of kills: a row ends with those begun by then"
    )
    parser.add_argument("--seed", type=int, default=1, help="of kills: which trainer, and when")
    given = parser.parse_args()
    os.environ.update(process_setup.memory_tunables(os.environ))
    telemetry.configure(level="ERROR", json=False)  # stdout is the table's; stopped jobs have stopped etcds
    parts, counts = given.parts.split(","), [int(each) for each in given.members.split(",")]
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STEPS_DATA"] = folder
        if "exchange" in parts:
            print(exchange.HEAD)
            for members in counts:
                names = given.rows.split(",")
                rows = exchange.measure(
                    names, members, given.mib, given.buckets, given.block_kib, given.rounds, Path(folder)
                )
                print(exchange.table(members, rows), flush=True)
                right = right and not any(row.wrong for row in rows)
        if "jobs" in parts:
            print(f"\n{jobs.HEAD}")
            for model in given.models.split(","):
                for members in counts:
                    windows = asyncio.run(
                        jobs.measure(model, members, given.rounds, given.seconds, Path(folder))
                    )
                    print(jobs.table(model, members, windows), flush=True)
        if "tables" in parts:
            right = _tables(given, Path(folder)) and right
        if "joining" in parts:
            print(f"\n{joining.HEAD}")
            for members in map(int, given.joining.split(",")):
                for apart in (False, True) if given.apart == "both" else (given.apart == "yes",):
                    work = joining.measure(members, given.state_mib, given.joins, Path(folder), apart=apart)
                    print(joining.table(members, given.state_mib, asyncio.run(work), apart=apart), flush=True)
        if "rebuilds" in parts:
            seen = asyncio.run(rebuilds.measure(given.rebuilds, Path(folder)))
            print(f"\n{rebuilds.HEAD}\n{rebuilds.table(seen)}")
        if "kills" in parts:
            counts_of = kills.Counts(
                given.kills, given.freezes, given.instants, given.gloo_kills, given.within_s
            )
            right = kills.report(counts_of, given.seed, Path(folder)) and right
    return 0 if right else 1


def _tables(given: argparse.Namespace, folder: Path) -> bool:
    """Prints its table. Whether all learn the same."""
    print(f"\n{tables.HEAD}")
    ways = given.table_ways.split(",")
    for model in given.table_models.split(","):
        if model == "clicks":
            tables.write_clicks(folder, given.table_rows)
        names = [name for name in tables.names_of(model) if name in ways]
        windows = asyncio.run(tables.measure(model, names, given.rounds, given.seconds, folder))
        print(tables.table(model, windows), flush=True)
    if given.no_losses:
        return True
    line, right = tables.loss_line(tables.losses(ways, folder))
    print(line)
    return right


if __name__ == "__main__":
    raise SystemExit(main())
