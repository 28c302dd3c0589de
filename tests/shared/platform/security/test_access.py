"""Which requests are admitted: by token and role, by the host that they name, by the page that they come
from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trireme_shared.platform.security.access import Access, Asked, is_loopback
from trireme_shared.platform.security.tokens import Role, TokenRecord, Tokens, TokenTable, digest_of
from trireme_shared.protocol.errors import (
    Forbidden,
    ForeignOrigin,
    TriremeError,
    Unauthorized,
    UnknownHost,
    UnsupportedMediaType,
)

OPEN = Access.of(Tokens(), ["trainer-host", "10.0.0.7", "fd00::7"])
GET = Asked("GET", host="localhost:8470")
POST = replace(GET, method="POST")


def refusal(access: Access, asked: Asked, needed: Role | None = Role.ADMIN) -> type[TriremeError] | None:
    try:
        access.admit(asked, needed)
    except TriremeError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:1", "127.8.9.1", "[::1]:80", "::1",
     "trainer-host:80", "Trainer-Host", "10.0.0.7", "[fd00::7]:443", "[fd00:0:0::7]"],
)  # fmt: skip
def test_names_of_the_service_are_served(host: str) -> None:
    assert refusal(OPEN, replace(GET, host=host)) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8470", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.8",
     "[fd00::8]", "trainer-host.evil", "0.0.0.0", "[::1].evil", "\udcff", "localhost:1:2",
     "localhost" + "." * 300],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    assert refusal(OPEN, replace(GET, host=host)) is UnknownHost
    assert refusal(OPEN, replace(GET, host=host), None) is UnknownHost, "also where no token is needed"


def test_the_address_at_which_a_connection_arrived_is_a_name() -> None:
    asked = replace(GET, host="192.168.7.7:8470")
    assert refusal(OPEN, asked) is UnknownHost
    assert refusal(OPEN, replace(asked, address="192.168.7.7")) is None
    assert refusal(OPEN, replace(asked, address="::ffff:192.168.7.7")) is None, (
        "an IPv6 socket that takes IPv4"
    )
    assert refusal(OPEN, replace(GET, host="", address="")) is UnknownHost


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost", "http://localhost:9999", "null", "\udcff"]
)
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    for asked in (GET, POST, replace(GET, method="OPTIONS")):
        assert refusal(OPEN, replace(asked, origin=origin)) is ForeignOrigin


def test_the_own_pages_are_served() -> None:
    for asked in (GET, POST):
        assert refusal(OPEN, replace(asked, origin="http://localhost:8470", fetch_site="same-origin")) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "unknown"])
def test_writes_for_other_sites_are_refused_by_what_the_browser_says(site: str) -> None:
    assert refusal(OPEN, replace(POST, fetch_site=site)) is ForeignOrigin
    assert refusal(OPEN, replace(GET, fetch_site=site)) is None, "a link may lead here"
    assert refusal(OPEN, replace(POST, fetch_site="none")) is None


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "Text/Plain; charset=utf-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ],
)
def test_what_forms_send_is_refused(content_type: str) -> None:
    assert refusal(OPEN, replace(POST, content_type=content_type)) is UnsupportedMediaType


def test_tokens_and_roles() -> None:
    guarded = Access.of(Tokens(given="secret"))
    for authorization in (
        "",
        "secret",
        "Basic secret",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer secret2",
        "Bearer \udcff",
    ):
        assert refusal(guarded, replace(GET, authorization=authorization), Role.VIEWER) is Unauthorized
        assert refusal(guarded, replace(GET, authorization=authorization), None) is None
    for authorization in ("Bearer secret", "bearer secret", "BEARER  secret "):
        assert refusal(guarded, replace(GET, authorization=authorization)) is None


def test_a_role_that_is_not_enough_is_another_refusal_than_no_token() -> None:
    viewer = TokenRecord(name="v", role=Role.VIEWER, sha256=digest_of("seen"))
    guarded = Access.of(Tokens(table=TokenTable(tokens=(viewer,))))
    asked = replace(GET, authorization="Bearer seen")
    found = [refusal(guarded, asked, needed) for needed in (Role.VIEWER, Role.MEMBER, Role.ADMIN)]
    assert found == [None, Forbidden, Forbidden]


def test_the_token_never_stands_in_a_refusal() -> None:
    with pytest.raises(Unauthorized) as caught:
        Access.of(Tokens(given="secret")).admit(
            replace(GET, authorization="Bearer almost-secret"), Role.VIEWER
        )
    assert "almost-secret" not in str(caught.value.to_map())


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "[::1]")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "my-host", "")] == [False] * 5
