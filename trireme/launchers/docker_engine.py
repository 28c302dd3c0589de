"""The few calls of the Docker Engine's API that the launcher makes, over a UNIX socket or TCP. Each has a
limit.

    GET  /version                       which version of the API both speak
    GET  /containers/json               by labels
    GET  /containers/{id}/json
    POST /containers/create?name=       POST /networks/{name}/connect       POST /containers/{id}/start
    POST /containers/{id}/stop?t=       DELETE /containers/{id}?force=&v=

A proxy before the Engine has to let these through and no others (docs/cluster.md).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp

from trireme_shared.platform.runtime.http import session
from trireme_shared.protocol.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidArgument,
    NotFound,
    PeerError,
    TooLarge,
    TriremeError,
)

DEFAULT = "unix:///var/run/docker.sock"
OLDEST, TESTED = (1, 40), (1, 41)
LOOK_S = 10.0  # for what only reads
CHANGE_S = 60.0  # a full disk or many containers make the Engine slow
STOP_S = 15.0  # beyond the grace of the container
ANSWER_BYTES = 64 << 20
# what is used of the answers
_LISTED: Mapping[str, type] = {"Id": str, "State": str, "Created": int, "Labels": dict}
_INSPECTED: Mapping[str, type] = {"Id": str, "Name": str, "Image": str, "Config": dict, "HostConfig": dict}
_TIMES = (304,)  # it is so already
_ID = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"(\d+)\.(\d+)")
_ERRORS: Mapping[int, type[TriremeError]] = {
    400: InvalidArgument,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
}


class Engine:
    """`address`: `unix:///path/of/docker.sock`, or `tcp://HOST:PORT` without TLS. Use `async with`.

    Raises of all calls: NotFound (a container, image or network), Conflict (a name is taken), Forbidden (a
    proxy does not let the call through), InvalidArgument (the Engine does not take it), PeerError (it cannot
    be reached, or failed), DeadlineExceeded.
    """

    def __init__(self, address: str = DEFAULT) -> None:
        parts = urlsplit(address)
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            self._socket, self._url = parts.path, "http://docker"
        elif parts.scheme == "tcp" and parts.hostname and not parts.path.strip("/"):
            self._socket, self._url = "", f"http://{parts.netloc}"
        else:
            hint = f"for example {DEFAULT}, or tcp://docker-proxy:2375"
            raise InvalidArgument(f"{address!r} is no address of a Docker Engine", hint=hint)
        self.address = address
        self._version = ""

    def __repr__(self) -> str:
        return f"<Engine {self.address}, API {self._version or 'not known yet'}>"

    async def __aenter__(self) -> Self:
        self._http = session(uds=self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    # ------------------------------------------------------------ calls

    async def containers(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """With all of these labels, running or not, as /containers/json lists them."""
        filters = json.dumps({"label": [f"{name}={value}" for name, value in labels.items()]})
        found = await self._call("GET", "/containers/json", {"all": "1", "filters": filters})
        if not isinstance(found, list):
            raise self._odd("GET /containers/json")
        return [self._with(each, _LISTED, "GET /containers/json") for each in found]

    async def container(self, name: str) -> dict[str, Any]:
        """By its name or id; in full."""
        found = await self._call("GET", f"/containers/{quote(name, safe='')}/json")
        return self._with(found, _INSPECTED, "GET /containers/{id}/json")

    async def create(self, name: str, body: Mapping[str, Any]) -> str:
        """The id of the new container, which does not run yet."""
        made = await self._call("POST", "/containers/create", {"name": name}, body, limit_s=CHANGE_S)
        return str(self._with(made, {"Id": str}, "POST /containers/create")["Id"])

    async def connect(self, network: str, container: str, endpoint: Mapping[str, Any]) -> None:
        body = {"Container": container, "EndpointConfig": dict(endpoint)}
        await self._call("POST", f"/networks/{quote(network, safe='')}/connect", body=body, limit_s=CHANGE_S)

    async def start(self, container: str) -> None:
        await self._call("POST", f"/containers/{container}/start", limit_s=CHANGE_S)

    async def stop(self, container: str, grace_s: int) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when it has ended."""
        await self._call(
            "POST", f"/containers/{container}/stop", {"t": str(grace_s)}, limit_s=grace_s + STOP_S
        )

    async def remove(self, container: str) -> None:
        """Kills it if it runs. Its volumes without a name go, too."""
        try:
            await self._call("DELETE", f"/containers/{container}", {"force": "1", "v": "1"}, limit_s=CHANGE_S)
        except (NotFound, Conflict):  # gone already, or just being removed
            return

    # ------------------------------------------------------------ parts

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        limit_s: float = 0.0,
    ) -> Any:
        if not self._version:
            self._version = self._common(await self._request("GET", "/version", {}, None, LOOK_S))
        try:
            return await self._request(
                method, f"/v{self._version}{path}", query or {}, body, limit_s or LOOK_S
            )
        except (PeerError, InvalidArgument):
            self._version = ""  # another Engine may be there now
            raise

    def _common(self, about: Any) -> str:
        """As old as this was tested with, or as the Engine still takes."""
        newest = _VERSION.fullmatch(str(about.get("ApiVersion"))) if isinstance(about, dict) else None
        if newest is None:
            raise PeerError(
                f"{self.address} does not say which version of the API it speaks; is it a Docker Engine?"
            )
        oldest = _VERSION.fullmatch(str(about.get("MinAPIVersion", "")))
        theirs = int(newest[1]), int(newest[2])
        if theirs < OLDEST:
            msg = f"the Docker Engine at {self.address} speaks API {newest[0]}; 1.40 or newer is needed"
            raise InvalidArgument(msg, hint="Docker Engine 19.03 or newer")
        least = (int(oldest[1]), int(oldest[2])) if oldest else OLDEST
        major, minor = max(min(theirs, TESTED), least)
        return f"{major}.{minor}"

    async def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None, limit_s: float
    ) -> Any:
        what = f"{method} {_ID.sub('{id}', path)}"  # each attempt has the same message
        headers = {
            "Accept-Encoding": "identity",
            **({"Content-Type": "application/json"} if body is not None else {}),
        }
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(limit_s):
                async with self._http.request(
                    method, self._url + path, params=query, data=data, headers=headers, allow_redirects=False
                ) as response:
                    answer = await self._read(response, what)
                    if response.status >= 300 and response.status not in _TIMES:
                        raise self._error(response.status, what, answer)
        except TimeoutError as error:
            msg = f"the Docker Engine at {self.address} gave no answer to {what} within {limit_s:g} s"
            raise DeadlineExceeded(msg) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        try:
            return json.loads(answer) if answer.strip() else None
        except ValueError as error:
            raise self._odd(what) from error

    def _with(self, found: Any, fields: Mapping[str, type], what: str) -> dict[str, Any]:
        """`found`, which has these fields. Raises PeerError."""
        if isinstance(found, dict) and all(
            isinstance(found.get(name), kind) for name, kind in fields.items()
        ):
            return found
        raise self._odd(what)

    def _odd(self, what: str) -> PeerError:
        return PeerError(f"{self.address} answered {what} with something else than a Docker Engine does")

    async def _read(self, response: aiohttp.ClientResponse, what: str) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(1 << 20):
            parts.append(part)
            if (size := size + len(part)) > ANSWER_BYTES:
                raise TooLarge(
                    f"the answer of {self.address} to {what} has more than {ANSWER_BYTES >> 20} MiB"
                )
        return b"".join(parts)

    def _error(self, status: int, what: str, answer: bytes) -> TriremeError:
        try:
            told = json.loads(answer)["message"]
        except (ValueError, KeyError, TypeError):
            told = answer[:200].decode(errors="replace").strip() or f"status {status}"
        kind = _ERRORS.get(status, PeerError)
        hint = (
            "a proxy before it must let the calls through that docs/cluster.md names" if status == 403 else ""
        )
        return kind(f"the Docker Engine at {self.address} refused {what}: {told}", hint=hint)

    def _unreachable(self, error: Exception) -> PeerError:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        path = Path(self._socket)
        match cause:
            case FileNotFoundError() if self._socket:
                hint = "mount the Engine's socket there, or give its address in TRIREME_DOCKER"
                return PeerError(f"there is no socket of a Docker Engine at {path}", hint=hint)
            case PermissionError() if self._socket:
                hint = f"run it in the group that owns the socket{_group(path)}"
                return PeerError(f"this user may not open the Docker Engine's socket {path}", hint=hint)
            case ConnectionRefusedError():
                return PeerError(f"nothing listens at {self.address}: the Docker Engine does not run")
        return PeerError(
            f"the Docker Engine at {self.address} cannot be reached: {type(cause).__name__}: {cause}"
        )


def _group(path: Path) -> str:
    try:
        return f" ({path.stat().st_gid}; `group_add` in a compose file)"
    except OSError:
        return ""
