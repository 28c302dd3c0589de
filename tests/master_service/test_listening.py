"""A master that is started again listens where it did before, so that pages and addresses of users stay
good."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from master_service.__main__ import listen
from master_service.settings import Settings
from trireme_shared.protocol.errors import InvalidArgument


def settings(file: Path | None = None, port: int = 0) -> Settings:
    return Settings(job="j", etcd="http://127.0.0.1:1", token="secret", port=port, port_file=file)


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_it_has_the_same_port_again_and_keeps_it_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "master-0.port"
    with listen(settings(file)) as first:
        port = port_of(first)
    assert file.read_text() == str(port)
    assert file.stat().st_mode & 0o077 == 0
    with listen(settings(file)) as again:
        assert port_of(again) == port


def test_a_port_that_is_taken_meanwhile_is_left_to_who_has_it(tmp_path: Path) -> None:
    file = tmp_path / "master-0.port"
    with socket.create_server(("127.0.0.1", 0)) as other:
        file.write_text(str(port_of(other)))
        with listen(settings(file)) as moved:
            assert port_of(moved) != port_of(other)
            assert file.read_text() == str(port_of(moved))


@pytest.mark.parametrize("said", ["", "0", "-1", "65536", "no port"])
def test_a_file_that_names_no_port_is_replaced(said: str, tmp_path: Path) -> None:
    file = tmp_path / "master-0.port"
    file.write_text(said)
    with listen(settings(file)) as listener:
        assert file.read_text() == str(port_of(listener))


def test_a_port_that_was_asked_for_counts_and_a_taken_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "master-0.port"
    with listen(settings(file)) as first, pytest.raises(InvalidArgument, match=r"cannot listen on .*free it"):
        listen(settings(file, port=port_of(first)))
    before = file.read_text()
    with listen(settings(file, port=int(before))):
        assert file.read_text() == before


def test_where_nothing_can_be_written_it_listens_all_the_same(tmp_path: Path) -> None:
    with listen(settings(tmp_path / "missing" / "master-0.port")) as listener:
        assert port_of(listener) > 0
