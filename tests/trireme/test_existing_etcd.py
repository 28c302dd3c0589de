"""How the command line, the environment and trireme.toml name an etcd that is there already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.equipment.etcd.real import embedded_etcd
from tests.master_service.cluster import spec_of
from trireme.existing_etcd import Claim, access_of, claim
from trireme.settings import UsageError, from_environment, from_flags, from_toml, merge
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.protocol.errors import Conflict, InvalidArgument
from trireme_shared.protocol.keys import ClusterKeys, Keys

__all__ = ["embedded_etcd"]

URL = "http://a:2379"


def access(flags: dict | None = None, environment: dict[str, str] | None = None) -> EtcdAccess | None:
    environment = environment or {}
    return access_of(merge([from_flags(flags or {}), from_environment(environment)]), environment)


def test_without_an_address_the_run_starts_its_own():
    assert access() is None


def test_flags_come_before_the_environment():
    found = access({"etcd": "http://b:1, http://c:1"}, {"TRIREME_ETCD": URL})
    assert found == EtcdAccess(("http://b:1", "http://c:1"))
    assert access({}, {"TRIREME_ETCD": URL}) == EtcdAccess((URL,))


def test_a_list_in_trireme_toml(tmp_path):
    (tmp_path / "trireme.toml").write_text(f'etcd = ["{URL}", "http://b:1"]\n')
    assert access_of(merge([from_toml(tmp_path / "trireme.toml")]), {}) == EtcdAccess((URL, "http://b:1"))


def test_a_password_in_trireme_toml_is_refused(tmp_path):
    (tmp_path / "trireme.toml").write_text('etcd_password = "secret"\n')
    with pytest.raises(UsageError, match="no setting 'etcd_password'; did you mean etcd_password_file"):
        from_toml(tmp_path / "trireme.toml")


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (
            {"etcd_user": "u"},
            {},
            "--etcd-user is of an etcd that is there already: give its address with --etcd",
        ),
        ({"etcd": " , "}, {}, "--etcd names no address"),
        ({"etcd": URL, "etcd_ca": "missing.pem"}, {}, "--etcd-ca = missing.pem: there is no such file"),
        ({"etcd": URL}, {"TRIREME_ETCD_PASSWORD": "x"}, "but no user: give --etcd-user"),
    ],
)
def test_what_cannot_be(flags, environment, said):
    with pytest.raises(UsageError, match=said):
        access(flags, environment)


def test_the_password_is_in_the_environment_of_members_and_in_no_text(tmp_path):
    found = access({"etcd": URL, "etcd_user": "u"}, {"TRIREME_ETCD_PASSWORD": "secret"})
    assert found is not None
    assert "secret" not in f"{found!r} {found} {found.facts()}"
    environment = found.environment()
    assert environment == {"TRIREME_ETCD": URL, "TRIREME_ETCD_USER": "u", "TRIREME_ETCD_PASSWORD": "secret"}
    assert EtcdAccess.from_facts(found.facts(), environment) == found


def test_a_member_reads_its_password_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "password").write_text("secret\r\nsecond line\n")
    for name, value in {
        "ETCD": "http://h:1",
        "ETCD_USER": "u",
        "ETCD_PASSWORD_FILE": tmp_path / "password",
    }.items():
        monkeypatch.setenv(f"TRIREME_{name}", str(value))
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "trireme_shared.platform.membership.etcd_access.connect",
        lambda urls, **rest: given.update(rest, urls=urls),
    )
    MemberSettings(job="j").connect()
    assert (given["urls"], given["user"], given["password"]) == (("http://h:1",), "u", "secret")
    Path(tmp_path / "password").unlink()
    with pytest.raises(InvalidArgument, match=r"password file .* cannot be read"):
        MemberSettings(job="j").connect()


# ------------------------------------------------------------ whose keys


KEYS = Keys("digits")


@pytest_asyncio.fixture
async def etcd(embedded_etcd: EmbeddedEtcd) -> AsyncIterator[Etcd]:
    client = connect([embedded_etcd.url])
    yield client
    await client.close()


async def below(etcd: Etcd, prefix: str) -> set[str]:
    return {kv.key for kv in (await etcd.range(prefix, prefix=True)).kvs}


async def claim_fresh(embedded: EmbeddedEtcd, folder: Path) -> None:
    wanted = Claim(folder, None, resumes=False, fresh=True)
    await claim(EtcdAccess((embedded.url,)), KEYS, wanted)


@pytest.mark.processes
async def test_a_run_gets_no_name_of_a_clusters_job_not_even_fresh(embedded_etcd, etcd, tmp_path):
    for key in (ClusterKeys().job("digits"), KEYS.spec, KEYS.task_meta):
        await etcd.put(key, b"{}")
    with pytest.raises(Conflict, match="the name digits is in use: it is a job of the cluster") as refused:
        await claim_fresh(embedded_etcd, tmp_path)
    assert refused.value.hint == "use another name: --job NAME"
    assert await below(etcd, "/trireme/") == {ClusterKeys().job("digits"), KEYS.spec, KEYS.task_meta}


@pytest.mark.processes
async def test_a_run_gets_no_name_of_a_communicator_that_has_members(embedded_etcd, etcd, tmp_path):
    await etcd.put(KEYS.collective_member("x"), b"{}")
    with pytest.raises(Conflict, match="the name digits is in use: it is a communicator"):
        await claim_fresh(embedded_etcd, tmp_path)
    assert await below(etcd, "/trireme/") == {KEYS.collective_member("x")}


@pytest.mark.processes
async def test_fresh_deletes_the_keys_of_a_run_and_what_a_communicator_without_members_left(
    embedded_etcd, etcd, tmp_path
):
    other = Keys("digits-2")
    await etcd.put(KEYS.spec, spec_of(job="digits").to_bytes())
    for key in (KEYS.task_meta, KEYS.pserver(0), KEYS.collective_epoch, other.task_meta):
        await etcd.put(key, b"{}")
    await claim_fresh(embedded_etcd, tmp_path)
    assert await below(etcd, "/trireme/") == {other.task_meta}
