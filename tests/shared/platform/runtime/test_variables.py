"""Service links of Kubernetes and Docker are no settings; what merely looks like one is refused by name."""

from __future__ import annotations

import pytest

from master_service.settings import Settings as MasterSettings
from trainer_agent.settings import Settings as TrainerSettings
from trireme.containers.gateway import Settings as GatewaySettings
from trireme.pool.settings import passed_on
from trireme.settings import from_environment
from trireme_shared.platform.membership.settings import MemberSettings, read
from trireme_shared.platform.runtime.variables import without_service_links

ADDRESS = "tcp://10.9.8.7:8470"
KUBERNETES = {
    "TRIREME_SERVICE_HOST": "10.9.8.7",
    "TRIREME_SERVICE_PORT": "8470",
    "TRIREME_PORT": ADDRESS,
    "TRIREME_PORT_8470_TCP": ADDRESS,
    "TRIREME_PORT_8470_TCP_PROTO": "tcp",
    "TRIREME_PORT_8470_TCP_PORT": "8470",
    "TRIREME_PORT_8470_TCP_ADDR": "10.9.8.7",
}
DOCKER = {
    "TRIREME_PORT": ADDRESS,
    "TRIREME_PORT_8470_TCP": ADDRESS,
    "TRIREME_NAME": "/web/trireme",
    "TRIREME_ENV_LANG": "C",
}


@pytest.mark.parametrize("links", [KUBERNETES, DOCKER])
def test_settings_and_commands_do_without_service_links(links, monkeypatch):
    for name, value in {**links, "TRIREME_JOB": "j", "TRIREME_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert MemberSettings.from_environment().port == 0
    assert MasterSettings.from_environment().name == "master"
    assert read(GatewaySettings).port == 8470
    assert from_environment().values.keys() == {"job"}
    assert not {"TRIREME_PORT", "TRIREME_NAME"} & passed_on({**links}).keys()


def test_the_link_of_a_service_called_exchange_is_no_port_of_trainers(monkeypatch):
    links = {name.replace("TRIREME_", "TRIREME_EXCHANGE_"): value for name, value in KUBERNETES.items()}
    for name, value in {**links, "TRIREME_JOB": "j"}.items():
        monkeypatch.setenv(name, value)
    assert TrainerSettings.from_environment().exchange_port == 0


@pytest.mark.parametrize(
    "own",
    [
        {"TRIREME_PORT": ADDRESS},
        {"TRIREME_PORT": "8470", "TRIREME_SERVICE_HOST": "10.9.8.7"},
        {"TRIREME_PORT": "eight", "TRIREME_SERVICE_HOST": "10.9.8.7"},
        {"TRIREME_PORT": ADDRESS, "TRIREME_PORT_8471_TCP": ADDRESS},
        {"TRIREME_NAME": "/web/trireme"},
        {"TRIREME_NAME": "master-1", "TRIREME_PORT": "8470", "TRIREME_SERVICE_HOST": "10.9.8.7"},
        {"HTTP_PORT": ADDRESS, "HTTP_SERVICE_HOST": "10.9.8.7"},
    ],
)
def test_what_somebody_may_have_set_is_kept(own):
    assert without_service_links(own) == own


def test_a_wrong_value_is_refused_with_its_name_and_value(monkeypatch, capsys):
    monkeypatch.setenv("TRIREME_JOB", "j")
    monkeypatch.setenv("TRIREME_PORT", "eight")
    with pytest.raises(SystemExit) as caught:
        MemberSettings.from_environment()
    assert caught.value.code == 2
    assert "TRIREME_PORT=eight: Input should be a valid integer" in capsys.readouterr().err
