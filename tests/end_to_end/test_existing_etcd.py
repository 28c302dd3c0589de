"""`trireme run --etcd`: a real etcd, started by the test, with users and passwords or with TLS, instead of
the run's own."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.end_to_end.command import Command, Done, wait_for, wait_for_step
from tests.end_to_end.scripts import RECORDS, UNHURRIED_LOSS, write_script
from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.etcd.with_tls import make_certificates, tls_etcd
from trireme.view.child_events import read_events
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd, free_ports
from trireme_shared.platform.membership.etcd_access import EtcdAccess

__all__ = ["embedded_etcd"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PASSWORD = "not-the-usual-word"
FEW = ("--trainers", 1, "--pservers", 1)


async def run(trireme: Command, *arguments: object, **environment: str) -> Done:
    return await asyncio.to_thread(trireme.run, *arguments, **environment)


@pytest_asyncio.fixture
async def with_users(embedded_etcd: EmbeddedEtcd) -> EmbeddedEtcd:
    """User `rower` may read and write below /trireme/, nothing else."""
    client = connect([embedded_etcd.url])
    # /trireme/ to /trireme0
    rights = {"permType": "READWRITE", "key": "L3RyaXJlbWUv", "range_end": "L3RyaXJlbWUw"}
    for method, body in (
        ("/auth/role/add", {"name": "root"}),
        ("/auth/user/add", {"name": "root", "password": "root"}),
        ("/auth/user/grant", {"user": "root", "role": "root"}),
        ("/auth/role/add", {"name": "rowers"}),
        ("/auth/role/grant", {"name": "rowers", "perm": rights}),
        ("/auth/user/add", {"name": "rower", "password": PASSWORD}),
        ("/auth/user/add", {"name": "stranger", "password": PASSWORD}),
        ("/auth/user/grant", {"user": "rower", "role": "rowers"}),
        ("/auth/enable", {}),
    ):
        await client.transport.call(method, body, 5.0)
    await client.close()
    return embedded_etcd


def check_own_etcd_was_not_started(folder: Path) -> None:
    assert not (folder / "etcd").exists()
    assert "etcd" not in {event["child"] for event in read_events(folder)}


async def test_a_user_with_a_password_trains_and_the_password_is_nowhere_on_disk(
    trireme: Command, with_users: EmbeddedEtcd, tmp_path: Path
) -> None:
    script, url = write_script(tmp_path), with_users.url
    secret = {"TRIREME_ETCD_PASSWORD": PASSWORD}
    done = await run(trireme, "run", script, *FEW, "--json", "--etcd", url, "--etcd-user", "rower", **secret)
    assert done.code == 0, done.err
    assert f"existing etcd at {url}" in done.err
    result = json.loads(done.out)
    assert (result["phase"], result["records"]) == ("COMPLETED", 2 * RECORDS)
    folder = tmp_path / ".trireme" / "script"
    check_own_etcd_was_not_started(folder)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "trireme.toml").write_text(
        f'etcd = ["{url}"]\netcd_user = "rower"\netcd_password_file = "password"\ntrainers = '
        "1\npservers = 1\n"
    )
    again = await run(trireme, "run", script, "--json", "--fresh")
    assert again.code == 0, again.err
    assert json.loads(again.out)["records"] == 2 * RECORDS
    shutil.rmtree(folder)
    masterless = await run(trireme, "run", script, "--job", "no-master", "--dispatch", "etcd", "--json")
    assert masterless.code == 0, masterless.err


@pytest.mark.parametrize(
    ("arguments", "password", "said"),
    [
        (("--etcd-user", "rower"), "wrong", "refused user rower: .*authentication failed"),
        (
            ("--etcd-user", "stranger"),
            PASSWORD,
            "user stranger may not read and write /trireme/script/.*permission denied",
        ),
        ((), "", "refused no user"),
    ],
)
async def test_wrong_credentials_are_one_message_within_seconds(
    trireme: Command,
    with_users: EmbeddedEtcd,
    tmp_path: Path,
    arguments: tuple[str, ...],
    password: str,
    said: str,
) -> None:
    secret = {"TRIREME_ETCD_PASSWORD": password} if password else {}
    began = time.monotonic()
    done = await run(trireme, "run", write_script(tmp_path), "--etcd", with_users.url, *arguments, **secret)
    assert time.monotonic() - began < 30, "no script was loaded, nothing was started"
    assert done.code == 5, done.err
    assert re.search(f"^error: .*{said}", done.err, re.MULTILINE), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / ".trireme").exists()


async def test_an_etcd_that_nobody_reaches_is_one_message_within_seconds(
    trireme: Command, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    done = await run(trireme, "run", write_script(tmp_path), "--json", TRIREME_ETCD=url)
    assert done.code == 6, done.err
    assert f"error: etcd at {url} cannot be used: " in done.err
    assert json.loads(done.out)["error"]["code"] == "UNAVAILABLE"
    assert not (tmp_path / ".trireme").exists()


@pytest.mark.soak  # for its length
async def test_a_run_is_interrupted_resumed_and_told_from_runs_of_others(
    trireme: Command, embedded_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    script, url = write_script(tmp_path, loss=UNHURRIED_LOSS), embedded_etcd.url
    command = ("run", script, *FEW, "--epochs", 2000, "--etcd", url)
    running = trireme.begin(*command)
    with running:
        await asyncio.to_thread(wait_for, running, r"^RUNNING ")
        await asyncio.to_thread(wait_for_step, trireme, 5)
        killed = await run(trireme, "chaos", "kill", "etcd")
        assert killed.code == 3, killed.err
        assert f"the etcd of this job, at {url}, was not started by trireme run" in killed.err
        assert json.loads((await run(trireme, "explain", "--json")).out)["code"] == "PROGRESS_IS_FINE"
        receipt = await run(trireme, "chaos", "kill", "trainer-0", "--json")
        assert receipt.code == 0, receipt.err
        doctor = json.loads((await run(trireme, "doctor", "--json")).out)
        assert f"etcd at {url} has stored" in doctor["checks"]["space"]["text"]
        twice = await run(trireme, *command, "--data-dir", "elsewhere")
        assert twice.code == 4, twice.err
        assert f"etcd at {url} holds a job script of another run" in twice.err
        taken = await run(trireme, *command, "--data-dir", "elsewhere", "--fresh")
        assert taken.code == 4, taken.err
        assert "job script is run by somebody else" in taken.err
        running.send_signal(signal.SIGINT)
        done = await asyncio.to_thread(trireme.end_of, running)
        assert done.code == 130, done.err
    assert (await run(trireme, "explain", "--json")).code == 0
    without = await run(trireme, "run", script, *FEW, "--epochs", 2000)
    assert without.code == 4, without.err
    assert f"its task queue is in etcd at {url}" in without.err
    async with EmbeddedEtcd(tmp_path / "other") as other:
        wrong = await run(trireme, "run", script, *FEW, "--epochs", 2000, "--etcd", other.url)
        assert wrong.code == 4, wrong.err
        assert "knows nothing of it" in wrong.err
    resumed = trireme.begin(*command)
    with resumed:
        await asyncio.to_thread(wait_for, resumed, r"job script is unfinished: it resumes")
        step = await asyncio.to_thread(wait_for_step, trireme, 6)
        resumed.send_signal(signal.SIGINT)
        assert (await asyncio.to_thread(trireme.end_of, resumed)).code == 130
    assert step > 5
    check_own_etcd_was_not_started(tmp_path / ".trireme" / "script")


@pytest.mark.soak  # for its length
async def test_an_etcd_that_goes_and_comes_during_the_run(
    trireme: Command, embedded_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    running = trireme.begin("run", script, *FEW, "--epochs", 30, "--etcd", embedded_etcd.url, "--json")
    with running:
        await asyncio.to_thread(wait_for, running, r"^RUNNING ")
        await asyncio.to_thread(wait_for_step, trireme, 5)
        await embedded_etcd.kill()
        told = json.loads((await run(trireme, "explain", "--json")).out)
        assert told["code"] in ("ETCD_SILENT", "ETCD_UNREACHABLE")
        await embedded_etcd.start()
        done = await asyncio.to_thread(trireme.end_of, running)
    assert done.code == 0, done.err
    assert json.loads(done.out)["phase"] == "COMPLETED"


@pytest_asyncio.fixture
async def tls(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path / "certificates"
    folder.mkdir()
    make_certificates(folder)
    async with tls_etcd(folder, "server") as (url, _):
        client = EtcdAccess(
            (url,), ca=str(folder / "ca.pem"), cert=str(folder / "client.pem"), key=str(folder / "client.key")
        ).connect()
        await client.put("/ready", b"", timeout_s=20)
        await client.close()
        yield url, folder


async def test_certificates(trireme: Command, tls: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = tls
    script = write_script(tmp_path)
    files = ("--etcd-cert", folder / "client.pem", "--etcd-key", folder / "client.key")
    done = await run(
        trireme, "run", script, *FEW, "--json", "--etcd", url, "--etcd-ca", folder / "ca.pem", *files
    )
    assert done.code == 0, done.err
    assert json.loads(done.out)["phase"] == "COMPLETED"
    untrusted = await run(trireme, "run", script, *FEW, "--fresh", "--etcd", url, *files)
    assert untrusted.code == 6, untrusted.err
    assert "certificate" in untrusted.err
    assert "--etcd-ca" in untrusted.err
