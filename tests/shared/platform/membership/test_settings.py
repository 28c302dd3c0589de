"""Settings of members: which of them may listen where."""

from __future__ import annotations

import socket

import pytest
from structlog.testing import capture_logs

from master_service.settings import Settings as MasterSettings
from pserver_service.settings import Settings as PserverSettings
from tests.equipment.waiting import until
from trainer_agent.settings import Settings as TrainerSettings
from trireme.pool.settings import Settings as HostSettings
from trireme_shared.platform.membership.settings import CONFIGURATION, MemberSettings
from trireme_shared.platform.security.access import Asked
from trireme_shared.platform.security.tokens import Role

SERVICES: list[type[MemberSettings]] = [MasterSettings, PserverSettings, TrainerSettings, HostSettings]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "TOKENS_FILE", "HOST", "ALLOWED_HOSTS", "ADVERTISE"):
        monkeypatch.delenv(f"TRIREME_{name}", raising=False)
    monkeypatch.setenv("TRIREME_JOB", "j")


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some-host"])
def test_no_service_listens_beyond_loopback_without_a_token(
    kind: type[MemberSettings], host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIREME_HOST", host)
    with pytest.raises(SystemExit) as caught:
        kind.from_environment()
    assert caught.value.code == CONFIGURATION
    said = capsys.readouterr().err
    told = f"{host} lets other hosts reach this process, and no token protects it"
    assert f"TRIREME_HOST={host}: Value error, {told}" in said
    monkeypatch.setenv("TRIREME_TOKEN", "secret")
    assert kind.from_environment().host == host


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_loopback_needs_no_token(
    kind: type[MemberSettings], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_HOST", host)
    assert kind.from_environment().host == host


@pytest.mark.parametrize(("host", "told"), [("pod-7f9c.invalid", 1), ("127.0.0.1", 0), ("::1", 0)])
async def test_a_name_that_nobody_can_look_up_is_told_with_the_variable_that_changes_it(
    host: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()

    def resolved(name: str, port: None) -> list[object]:
        looked_up.append(name)
        if name.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setenv("TRIREME_ADVERTISE", host)
    with capture_logs() as logs:
        MemberSettings.from_environment().look_up_own_name()
        await until(lambda: looked_up, "the name to be looked up")
        await until(lambda: len(logs) == told, "the log")
    assert looked_up == [host]
    assert all(line["host"] == host and "TRIREME_ADVERTISE" in line["hint"] for line in logs)


def test_a_service_answers_to_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "HOST": "0.0.0.0",
        "ADVERTISE": "10.0.0.7",
        "ALLOWED_HOSTS": "trireme.example, proxy",
        "TOKEN": "secret",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"TRIREME_{name}", value)
    access = MasterSettings.from_environment().access
    for host in ("10.0.0.7:1", "trireme.example", "proxy:443", "localhost"):
        access.admit(Asked("GET", host=host, authorization="Bearer secret"), Role.ADMIN)


@pytest.mark.parametrize("kind", SERVICES)
def test_a_job_that_no_job_is_called_is_refused_with_the_name_that_is_meant(
    kind: type[MemberSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIREME_JOB", "my_job")
    with pytest.raises(SystemExit) as caught:
        kind.from_environment()
    assert caught.value.code == CONFIGURATION
    said = capsys.readouterr().err
    assert "TRIREME_JOB=my_job: Value error, a job's name has lower-case" in said
    assert "the nearest one is my-job" in said
