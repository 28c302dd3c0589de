"""What reading costs beside computing, in plain PyTorch and here: python -m benchmarks.reading
[--kinds decodes,waits,python] [--seconds 4] [--set lanes=8] [--markdown]

One model and dataset (scripts/reading.py): computing takes `--seconds` with records in memory, and reading as
long. One trainer, one torch thread. With one lane the parameters must be plain PyTorch's bits.

    reading      nothing is computed         DataLoader    plain PyTorch, records are read by the loop itself
    computing    records are in memory                     (0 workers) or by processes beside it
                                             trireme       from its first record to its last minibatch, with
                                                           data_workers

    jpeg         pictures of 640 x 480 points are decoded and made smaller, by pillow
    decodes      zlib, which lets go of the interpreter's lock, as decoders of images do
    waits        both sleep for most of the time: only the order counts
    python       pure Python, which keeps the lock: threads do not help
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.scripts import reading
from benchmarks.scripts.reading import Given

SCRIPT = Path(reading.__file__)
BATCH = reading.config.global_batch_size or 1
WORKERS = 0, 2
TRIED = 20  # how often a record and a minibatch repeat their work while it is measured how long that takes
LIMIT_S = 300.0
STRATEGIES = {
    "trireme, a parameter server": ("--pservers", "1"),
    "trireme, collective": ("--strategy", "collective"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="decodes")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--set", action="append", default=[], help="a setting of the jobs: lanes=8")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind in arguments.kinds.split(","):
        show(kind, measure(kind, arguments.seconds, arguments.set), markdown=arguments.markdown)


def measure(kind: str, seconds: float, settings: list[str]) -> Iterator[tuple[str, float]]:
    """Rows and their seconds, as they are known. Raises SystemExit if the parameters of a job with the
    script's settings are not those of plain PyTorch."""
    given = reading.GIVEN = calibrated(Given(kind=kind), seconds)
    batches: list[Mapping[str, torch.Tensor]] = []
    yield "reading", seconds_of(lambda: batches.extend(DataLoader(reading.Slow(), batch_size=BATCH)))
    computing_s, expected = train(batches)
    yield "computing", computing_s
    for workers in WORKERS:
        loader = DataLoader(reading.Slow(), batch_size=BATCH, num_workers=workers)
        yield f"DataLoader, {workers} workers", train(loader)[0]
    for (strategy, chosen), workers in product(STRATEGIES.items(), WORKERS):
        name, flags = f"{strategy}, {workers} workers", (*chosen, f"--set=data_workers={workers}")
        with tempfile.TemporaryDirectory(prefix="trireme-reading-") as folder:
            job_s, parameters = job(given, flags, settings, Path(folder))
        if not settings and any(not torch.equal(expected[key], parameters[key]) for key in expected):
            raise SystemExit(f"{kind}, {name}: the parameters are not those of plain PyTorch")
        yield name, job_s


def calibrated(given: Given, seconds: float) -> Given:
    """`given`, with which reading and computing each take about `seconds`."""
    steps = math.ceil(given.records / BATCH)
    if given.kind == "jpeg":
        return of_pictures(given, seconds)
    waits = given.kind == "waits"
    tried = 1 if waits else TRIED
    for _ in range(2):  # the first time warms up
        reading.GIVEN = replace(given, reads=tried, computes=tried)
        batches: list[Mapping[str, torch.Tensor]] = []
        loader = DataLoader(reading.Slow(), batch_size=BATCH, sampler=range(4 * BATCH))
        batch_s = seconds_of(lambda: batches.extend(loader)) / 4  # noqa: B023  it is called here
        step_s = train(batches)[0] / 4
    if waits:  # 1 ms in each trial; the rest of it is work beside the wait
        reads_ms, computes_ms = (1000 * (seconds / steps - each_s) for each_s in (batch_s, step_s))
        return replace(given, reads=1 + reads_ms / BATCH, computes=1 + computes_ms)
    reads, computes = (round(TRIED * seconds / steps / each_s) for each_s in (batch_s, step_s))
    return replace(given, reads=max(1, reads), computes=max(1, computes))


def of_pictures(given: Given, seconds: float) -> Given:
    """As `calibrated`: each record is decoded once, and there are as many as that takes."""
    reading.GIVEN = replace(given, records=4 * BATCH, computes=TRIED)
    batches: list[Mapping[str, torch.Tensor]] = []
    for _ in range(2):  # the first time warms up
        batches.clear()
        batch_s = seconds_of(lambda: batches.extend(DataLoader(reading.Slow(), batch_size=BATCH))) / 4
        step_s = train(batches)[0] / 4
    steps = max(1, round(seconds / batch_s))
    return replace(given, records=steps * BATCH, computes=max(1, round(TRIED * batch_s / step_s)))


def seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def train(batches: Iterable[Mapping[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """One epoch in plain PyTorch: seconds, parameters."""
    torch.manual_seed(reading.config.seed or 0)
    model = reading.model()
    optimizer = reading.optimizer(model)
    began = time.monotonic()
    for batch in batches:
        optimizer.zero_grad()
        reading.loss(model, batch).backward()
        optimizer.step()
    return time.monotonic() - began, model.state_dict()


def job(
    given: Given, flags: tuple[str, ...], settings: list[str], folder: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    """As `train`, from the first record that the trainer reads to its last minibatch."""
    noted = folder / "noted"
    environment = {**os.environ, "READING": json.dumps(asdict(replace(given, noted=str(noted))))}
    command = [sys.executable, "-m", "trireme", "run", str(SCRIPT), "--trainers", "1", *flags, "--no-check"]
    command += ["--storage", str(folder / "job"), *(f"--set={each}" for each in settings)]
    ran = subprocess.run(
        command, env=environment, cwd=folder, timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"the job failed: {ran.stdout}{ran.stderr}")
    began, ended = (float(Path(name).read_text()) for name in (f"{noted}.began", noted))
    (exported,) = (folder / "job").rglob("model.pt")
    return ended - began, torch.load(exported, weights_only=True)


def show(kind: str, rows: Iterable[tuple[str, float]], *, markdown: bool) -> None:
    if markdown:
        print(f"| {kind} | seconds | of the longer of both | records a second |\n|---|---|---|---|")
    longer_s = 0.0
    for name, seconds in rows:
        longer_s = max(longer_s, seconds) if name in ("reading", "computing") else longer_s
        share, pace = f"{seconds / longer_s:.2f}", f"{reading.GIVEN.records / seconds:.0f}"
        if markdown:
            print(f"| {name} | {seconds:.2f} | {share} | {pace} |", flush=True)
        else:
            told = f"{seconds:6.2f} s, {share} of the longer of both, {pace:>5} records a second"
            print(f"{kind:8} {name:38} {told}", flush=True)


if __name__ == "__main__":
    main()
