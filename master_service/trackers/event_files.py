"""TensorBoard's event files, by TensorBoard's own writer: of `trireme tensorboard`, and the tracker
`tensorboard`.

A folder: the writer appends to a file of its process. Another storage: the file is written in a temporary
folder and sent as a whole, so a new one begins after PART_BYTES. What is there already is read back by
TensorBoard's own reader, which stops at a torn end.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from master_service.trackers.tracker import Point, Run
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import Conflict

FOLDER = "tensorboard"
PART_BYTES = 4 << 20
SETTINGS, RESULT, ATTEMPT = "trireme/settings", "trireme/result", "trireme/attempt"


class EventFiles:
    """In a folder; `fresh`: which has none yet. Use it as a context manager. Raises Conflict, OSError."""

    def __init__(self, folder: Path, *, fresh: bool = True) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415  an extra

        if fresh and folder.exists() and any(folder.iterdir()):
            raise Conflict(
                f"{folder} is not empty: event files there would be shown beside these",
                hint="choose another --out",
            )
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        self._writer: Any = EventFileWriter(str(folder))
        [self.file] = set(folder.iterdir()) - before

    def __repr__(self) -> str:
        return f"<EventFiles in {self._writer.get_logdir()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """At the first step of each point: its mean."""
        self.write_values((name, row["step"], row["mean"]) for row in rows)

    def write_values(self, values: Iterable[tuple[str, int, float]]) -> None:
        """Of (metric, step, value)."""
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        for name, step, value in values:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._writer.add_event(Event(wall_time=clock.wall_time(), step=step, summary=summary))
        self._writer.flush()

    def write_text(self, name: str, step: int, text: str) -> None:
        """For TensorBoard's page of texts."""
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415

        self._writer.add_event(Event(wall_time=clock.wall_time(), step=step, summary=text_pb(name, text)))
        self._writer.flush()


class EventFilesTracker:
    """The tracker `tensorboard`, in `<storage>/tensorboard/`."""

    def __init__(self) -> None:
        self._files: EventFiles | None = None
        self._temporary: Path | None = None
        self._place, self._last = "", 0

    def begin(self, run: Run) -> Mapping[str, int]:
        self._place = files.join(run.storage, FOLDER)
        folder = files.local_path(self._place)
        if folder is None:
            folder = self._temporary = Path(tempfile.mkdtemp(prefix="trireme-tensorboard-"))
            for name in files.names(self._place):
                (folder / name).write_bytes(files.read_bytes(files.join(self._place, name)))
        told, texts = read_back(folder)
        self._files = EventFiles(folder, fresh=False)
        self._files.write_text(ATTEMPT, run.attempt, json.dumps(run.tags))
        if SETTINGS not in texts:
            rows = [f"| {name} | {value} |" for name, value in run.parameters.items()]
            self._files.write_text(SETTINGS, 0, "\n".join(["| setting | value |", "|---|---|", *rows]))
        self._publish()
        return told

    def log(self, points: Sequence[Point]) -> None:
        assert self._files is not None, "log before begin"
        self._files.write_values((point.name, point.step, point.value) for point in points)
        self._last = max(self._last, *(point.step for point in points))
        self._publish()

    def end(self, result: Mapping[str, Any]) -> None:
        assert self._files is not None, "end before begin"
        self._files.write_text(RESULT, self._last, f"```\n{json.dumps(result, indent=2)}\n```")
        self._publish()
        self.close()

    def close(self) -> None:
        if self._files is not None:
            self._files.__exit__()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._files = self._temporary = None

    def _publish(self) -> None:
        if self._temporary is None or self._files is None:
            return
        file = self._files.file
        files.write_bytes(files.join(self._place, file.name), file.read_bytes())
        if file.stat().st_size > PART_BYTES:
            self._files.__exit__()
            self._files = EventFiles(self._temporary, fresh=False)


def read_back(folder: Path) -> tuple[dict[str, int], set[str]]:
    """(By metric the first step that the event files lack, the names of texts)."""
    # an extra
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    if not folder.is_dir() or not any(folder.iterdir()):
        return {}, set()
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 1})  # 0: all
    reader.Reload()
    tags = reader.Tags()
    steps = {name: 1 + max(event.step for event in reader.Scalars(name)) for name in tags["scalars"]}
    return steps, set(tags["tensors"])
