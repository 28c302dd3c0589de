"""What a hostile peer does to ports of a job, each for a bounded time; an attack returns how often it got
which answer.

idle, slow ......... connections that say nothing, or a byte now and then
bombs .............. requests that are deep, long, many, or lie about their length
strangers .......... every route of the schema with no token, a wrong one, a viewer's
frames ............. noise and frames that lie, on upgraded streams of a peer that has a member's token
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.transport.stream import FrameStream, upgrade

Answers = Counter[str]
ANSWER_S, BOMB_S = 10.0, 3.0


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


async def idle(urls: Sequence[str], count: int, seconds: float) -> Answers:
    """`count` connections at each of `urls` that say nothing; how many were cut within `seconds`."""
    answers: Answers = Counter()
    opened = []
    for number in range(count * len(urls)):
        try:
            async with asyncio.timeout(ANSWER_S):
                opened.append(await asyncio.open_connection(*address_of(urls[number % len(urls)])))
            answers["opened"] += 1
        except OSError as error:
            answers[type(error).__name__] += 1
        if number % 100 == 99:
            await asyncio.sleep(0.05)
    await asyncio.sleep(seconds)
    for reader, writer in opened:
        answers["cut"] += reader.at_eof() or reader.exception() is not None
        writer.close()
    return answers


async def slow(urls: Sequence[str], count: int, seconds: float) -> Answers:
    """Heads that come byte for byte, and bodies that never end."""

    async def one(url: str, body: bool) -> str:
        host, port = address_of(url)
        head = f"POST /v1/init HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 1000\r\n"
        words = (head + ("\r\n{" if body else "X-Slow: ")).encode()
        try:
            _, writer = await asyncio.open_connection(host, port)
            writer.write(words)
            for _ in range(int(seconds / 0.5)):
                await asyncio.sleep(0.5)
                writer.write(b"a")
                await writer.drain()
        except OSError:
            return "cut"
        else:
            return "open"
        finally:
            writer.close()

    return Counter(
        await asyncio.gather(*(one(url, number % 2 == 0) for url in urls for number in range(count)))
    )


def bombs_of(host: str, token: str) -> list[bytes]:
    """Requests that are more than they seem."""
    line, deep = (
        f"Host: {host}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n",
        200_000,
    )

    def post(path: str, body: bytes, *more: str) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\n{line}Content-Length: "
            f"{len(body)}\r\n{''.join(each + chr(13) + chr(10) for each in more)}\r\n"
        )
        return head.encode() + body

    paths = ("/v1/job/resizes", "/v1/resizes", "/v1/task-leases", "/v1/init", "/v1/table", "/v1/ledger")
    found = [post(path, b"[" * deep + b"]" * deep) for path in paths]
    found += [post(path, b'{"a":' * deep) for path in paths]
    found += [post(path, b"\x91" * deep) for path in paths]  # msgpack: lists in lists
    found += [
        post(path, struct.pack(">BI", kind, 0xFFFFFFFF))
        for path in paths
        for kind in (0xC6, 0xDD, 0xDF, 0xDB)
    ]
    found += [post(path, b'{"n": 1' + b"0" * 100_000 + b"}") for path in paths]
    found += [post(path, b"x" * (3 << 20)) for path in paths]
    found += [post(path, b"\x1f\x8b" + bytes(1000), "Content-Encoding: gzip") for path in paths]
    found += [f"POST {path} HTTP/1.1\r\n{line}Content-Length: {10**15}\r\n\r\n{{".encode() for path in paths]
    found += [
        f"POST {path} HTTP/1.1\r\n{line}Transfer-Encoding: chunked\r\n\r\n".encode()
        + b"fffff\r\n"
        + b"a" * 0xFFFFF
        for path in paths
    ]
    found.append(f"GET /healthz HTTP/1.1\r\n{line}".encode() + b"X-Long: " + b"a" * (1 << 20) + b"\r\n\r\n")
    found.append(f"GET /healthz HTTP/1.1\r\n{line}".encode() + b"X-Many: a\r\n" * 20_000 + b"\r\n")
    found.append(f"GET /v1/tasks?{'a=b&' * 15_000} HTTP/1.1\r\n{line}\r\n".encode())
    found.append(f"GET /v1/tasks?page_size={10**300} HTTP/1.1\r\n{line}\r\n".encode())
    found.append(f"GET /{'../' * 5_000}etc/passwd HTTP/1.1\r\n{line}\r\n".encode())
    found.append(b"\x16\x03\x01" + bytes(500))
    return found


async def bombs(urls: Sequence[str], token: str) -> Answers:
    """By a peer that has `token`; the answer's status, or `cut`."""
    at_once = asyncio.Semaphore(8)

    async def one(url: str, words: bytes) -> str:
        try:
            async with at_once, asyncio.timeout(BOMB_S):
                reader, writer = await asyncio.open_connection(*address_of(url))
                try:
                    writer.write(words)
                    answer = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            return "waiting"  # for the rest of a body
        except (OSError, ValueError):
            return "cut"
        return answer.split(b" ")[1].decode() if answer.startswith(b"HTTP/1.1 ") else "cut"

    sent = ((url, words) for url in urls for words in bombs_of(urlsplit(url).netloc, token))
    return Counter(await asyncio.gather(*(one(*each) for each in sent)))


async def strangers(url: str, admin: str, tokens: dict[str, str]) -> dict[str, Answers]:
    """Every operation of the schema, with each of `tokens` ("": none): 401, 403, or the operation that was
    served."""
    found: dict[str, Answers] = {name: Counter() for name in tokens}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {admin}"}) as answer:
            paths = (await answer.json())["paths"]
        for path, operations in paths.items():
            place = url + path.replace("{", "").replace("}", "")
            for method in operations:
                for name, token in tokens.items():
                    headers = {"Authorization": f"Bearer {token}"} if token else {}
                    async with session.request(method, place, headers=headers, json={}) as answer:
                        found[name][
                            f"{answer.status}" if answer.status in (401, 403) else f"{method} {path}"
                        ] += 1
    return found


class Noise(FrameStream):
    """It says anything and reads what comes."""

    def __init__(self) -> None:
        super().__init__(codec.Limits(payload_bytes=1 << 20, blocks=0))
        self.over = asyncio.Event()

    def prepare(self, header: codec.Fields) -> codec.Fields:
        return header

    def place(self, _: codec.Fields, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def on_map(self, fields: codec.Fields) -> None:
        pass

    def on_block(self, payload: memoryview) -> None:
        pass

    def on_over(self, _: TriremeError | None) -> None:
        self.over.set()


def lies(draw: random.Random) -> bytes:
    """One message of another job that is not what it should be, or no message at all."""
    call = draw.choice(["push", "pull", "share", "init", "dance", "", 7, None])
    fields = {
        name: draw.choice([-1, 1 << 62, "x" * 300, None, [], {}, 0.5]) for name in draw.sample(NAMES, 4)
    }
    frame = codec.encode(
        {"id": draw.choice([1, -1, 1 << 60]), "call": call, "message": {"job": "other", **fields}}
    )
    match draw.randrange(6):
        case 0:
            return draw.randbytes(draw.randrange(1, 5000))
        case 1:
            cut = draw.randrange(len(frame))
            return frame[:cut] + draw.randbytes(8) + frame[cut:]
        case 2:
            return frame[: draw.randrange(1, len(frame))]
        case 3:
            return codec.encode_block(
                {"id": 1, "block": 0, "lanes": (0, 1), "count": 1}, draw.randrange(1 << 31)
            )
        case 4:
            return struct.pack(">BI", draw.choice([0xC6, 0xDD, 0xDF, 0xDB]), draw.randrange(1 << 32))
        case _:
            return frame * draw.randrange(1, 80)


NAMES = [
    "step",
    "generation",
    "term",
    "trainer",
    "blocks",
    "version",
    "wait_s",
    "offers",
    "lanes",
    "protocol",
    "took",
    "at",
]


async def frames(member: PserverMember, uds: str, token: str, *, seed: int, count: int) -> Answers:
    """`count` streams, one after the other, each with a few frames."""
    draw, answers = random.Random(seed), Counter[str]()
    for _ in range(count):
        try:
            stream = await upgrade(
                member.url, Noise, member.incarnation, uds=uds, token=token, limit_s=ANSWER_S
            )
        except TriremeError as error:
            answers[error.code] += 1
            continue
        for _ in range(draw.randrange(1, 6)):
            stream.send(lies(draw))
        try:
            async with asyncio.timeout(0.2):
                await stream.over.wait()
            answers["cut"] += 1
        except TimeoutError:
            answers["open"] += 1
        stream.abort()
    return answers
