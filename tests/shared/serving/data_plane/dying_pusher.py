"""A trainer that pushes two blocks of ones out of its own memory, and waits in the middle of its push to be
killed."""

import array
import asyncio
import sys

from trireme_shared.protocol.records.step import LanePosition, LaneZero
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import PushHeader
from trireme_shared.serving.transport.shared_memory import Region
from trireme_shared.serving.transport.stream import FrameStream, upgrade

BLOCK = 1 << 18


class Silent(FrameStream):
    """Waits for one answer."""

    def __init__(self) -> None:
        super().__init__(codec.Limits(payload_bytes=1, blocks=0))
        self.answered = asyncio.Event()

    def on_map(self, fields: codec.Fields) -> None:
        assert "error" not in fields, fields
        self.answered.set()


async def main(url: str, uds: str, token: str) -> None:
    region = Region.create(800_000)
    memoryview(region)[: 2 * BLOCK] = array.array("f", [1.0] * (2 * BLOCK // 4)).tobytes()
    stream = await upgrade(url, Silent, "ps-1", uds=uds, token=token)
    stream.send_map({"id": 1, "call": "share", "message": {"offers": [region.offer(0).model_dump()]}})
    await stream.answered.wait()
    positions = tuple(LanePosition(lane=lane, epoch=0, index=0, offset=lane) for lane in range(4))
    header = PushHeader(
        job="ctr",
        generation=1,
        mode="sync",
        trainer="t",
        step=0,
        positions=positions,
        lane_zero=LaneZero(options=({},)),
    )
    stream.send_map({"id": 2, "call": "push", "message": codec.plain(header)})
    for block in range(2):
        fields = {"id": 2, "block": block, "lanes": (0, 4), "count": 4, "at": (0, block * BLOCK, BLOCK)}
        stream.send(codec.encode_block(fields, 0))
    await asyncio.sleep(60)


asyncio.run(main(*sys.argv[1:]))
