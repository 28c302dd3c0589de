"""Which job or cluster a command means."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trireme.cli.targets import Target, cluster_target, job_target, local_run
from trireme.launch import run_folder
from trireme.pool import cluster_folder
from trireme.settings import UsageError
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.security.tokens import Role, TokenFolder
from trireme_shared.protocol.errors import InvalidArgument, NotFound, PeerError

LEADER, RUN = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("TRIREME_URL", "TRIREME_TOKEN", "TRIREME_TOKEN_FILE", "TRIREME_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def running_cluster(data_dir: Path, time_s: int = 0) -> Iterator[str]:
    """Its token."""
    with cluster_folder.opened(data_dir) as folder:
        tokens = TokenFolder(folder)
        tokens.prepare()
        token = tokens.token(Role.ADMIN)
        cluster_folder.publish(folder, LEADER, EtcdAccess(("http://e",)))
        if time_s:
            os.utime(folder / cluster_folder.FACTS, (time_s, time_s))
        yield token


@contextmanager
def running_job(data_dir: Path, job: str, time_s: int) -> Iterator[None]:
    folder = data_dir / job
    folder.mkdir(parents=True)
    TokenFolder(folder).prepare()
    run_folder.write_json(folder / run_folder.RUN_FILE, {"job": job, "url": RUN, "etcd": "http://e"})
    os.utime(folder / run_folder.RUN_FILE, (time_s, time_s))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_an_address_that_is_given_wins_and_names_the_job(tmp_path, monkeypatch):
    assert job_target("a", tmp_path, LEADER) == Target(f"{LEADER}/v1/jobs/a")
    assert job_target(None, tmp_path, LEADER) == Target(LEADER)
    assert job_target("a", tmp_path, "etcd+http://h:1/a").address == "etcd+http://h:1/a"
    assert job_target("b", tmp_path, f"{LEADER}/v1/jobs/a").address == f"{LEADER}/v1/jobs/a"
    token = tmp_path / "t"
    token.write_text("secret\n")
    monkeypatch.setenv("TRIREME_URL", LEADER)
    monkeypatch.setenv("TRIREME_TOKEN_FILE", str(token))
    assert cluster_target(tmp_path, None) == Target(LEADER, "secret")
    monkeypatch.setenv("TRIREME_TOKEN", "stronger")
    assert cluster_target(tmp_path, None).token == "stronger"


def test_a_token_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="TRIREME_TOKEN_FILE"):
        cluster_target(tmp_path, LEADER)


def test_without_a_cluster_and_without_a_run_there_is_nothing_to_ask(tmp_path):
    with pytest.raises(NotFound, match="no cluster runs in"):
        cluster_target(tmp_path, None)
    with pytest.raises(NotFound):
        job_target(None, tmp_path, None)
    with cluster_folder.opened(tmp_path), pytest.raises(PeerError, match="has no leader yet"):
        cluster_target(tmp_path, None)
    with pytest.raises(NotFound, match="no cluster runs in"):
        cluster_target(tmp_path, None)


def test_a_job_of_the_cluster_is_found_and_a_run_of_that_name_goes_first_while_it_runs(tmp_path):
    with running_cluster(tmp_path) as token:
        assert job_target("a", tmp_path, None) == Target(f"{LEADER}/v1/jobs/a", token, in_cluster=True)
        assert local_run("a", tmp_path, None) is None
        with running_job(tmp_path, "a", time_s=1):
            assert job_target("a", tmp_path, None) == Target(
                RUN, TokenFolder(tmp_path / "a").token(Role.ADMIN)
            )
            assert local_run("a", tmp_path, None) == tmp_path / "a"
        assert job_target("a", tmp_path, None).in_cluster


@pytest.mark.parametrize(("cluster_s", "run_s", "address"), [(10, 20, RUN), (20, 10, LEADER)])
def test_without_a_name_it_is_what_started_last(tmp_path, cluster_s, run_s, address):
    with running_cluster(tmp_path, cluster_s), running_job(tmp_path, "a", run_s):
        assert job_target(None, tmp_path, None).address == address


@pytest.mark.parametrize("name", ["../etc", "a/b", "..", "", "A", "a" * 64, "-a"])
def test_what_is_no_name_never_becomes_a_part_of_a_path(tmp_path, name):
    with running_cluster(tmp_path):
        if name:
            with pytest.raises(InvalidArgument, match="is no name of a job"):
                job_target(name, tmp_path, LEADER)


def test_one_cluster_at_a_time_and_its_token_is_its_owners(tmp_path):
    with running_cluster(tmp_path) as token:
        folder = cluster_folder.place_of(tmp_path)
        assert cluster_folder.owner_of(folder) == os.getpid()
        with (
            pytest.raises(UsageError, match=f"a cluster runs already in .* {os.getpid()}"),
            running_cluster(tmp_path),
        ):
            pass
        assert cluster_folder.find(tmp_path).token == token
    assert cluster_folder.owner_of(folder) == 0
    assert cluster_folder.find(tmp_path) is None
    with running_cluster(tmp_path) as again:
        assert again == token


def test_a_token_in_the_environment_goes_before_the_one_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_TOKEN", "given")
    with running_cluster(tmp_path) as token, running_job(tmp_path, "a", time_s=1):
        assert token != "given"
        assert job_target("a", tmp_path, None).token == "given"
        assert cluster_target(tmp_path, None).token == "given"
