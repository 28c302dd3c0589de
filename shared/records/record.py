"""The base of every record that crosses REST, etcd or the data plane."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Unknown fields are ignored: a newer peer may send more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()
