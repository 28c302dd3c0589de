"""Settings of one master, from the environment: TRIREME_JOB or TRIREME_STORAGE, TRIREME_ETCD, TRIREME_SPEC,
TRIREME_PORT, ..."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import NoDecode

from trireme_shared.platform.membership.etcd_access import split
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.record import misfits
from trireme_shared.protocol.urls import without_passwords


class Settings(MemberSettings):
    """With `job` the master leads that job alone; `spec`: path of its JobSpec as JSON, needed for a job's
    first master. Without `job` it leads a cluster of jobs; `storage`: path or URL below which their files go;
    `storage_allowed`: further places that a job may name for its own, with commas between.
    `rebalance_s`: no pool member changes jobs more often, unless a job starts or ends. `job_retention_s`: so
    long after its end a job of the cluster is deleted with its files (None: never). `logs`: patterns of the
    folders where members' logs lie on this host, with `:` between or as a JSON list; the logs of a cluster's
    jobs lie in a folder for each job there. `port_file`: with `port` 0, the port is kept there, and used
    again by the next process if it is free: pages that are open at this master find it again."""

    job: str = ""
    name: str = "master"
    storage: str = ""
    storage_allowed: Annotated[tuple[str, ...], NoDecode] = ()
    rebalance_s: float = Field(default=30.0, ge=0)
    job_retention_s: float | None = Field(default=None, gt=0)
    spec: Path | None = None
    master_ttl_s: float = Field(default=3.0, ge=2.0)
    port_file: Path | None = None
    logs: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("storage_allowed", mode="before")
    @classmethod
    def _places(cls, value: object) -> object:
        return split(value) if isinstance(value, str) else value

    @field_validator("logs", mode="before")
    @classmethod
    def _folders(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return (
                json.loads(value)
                if value.startswith("[")
                else [part for part in value.split(os.pathsep) if part]
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"it begins as a JSON list and is none: {error}") from error


def read_spec(path: Path) -> JobSpec:
    """Of TRIREME_SPEC. Raises InvalidArgument if the file cannot be read or is no job spec."""
    try:
        return JobSpec.from_bytes(path.read_bytes())
    except (OSError, ValidationError) as error:
        msg = f"TRIREME_SPEC={path} is no job spec: {without_passwords(misfits(error))}"
        raise InvalidArgument(msg) from error
