"""Where a job's metrics go beside its storage: trackers, as settings name them.

"csv"  "tensorboard"  "mlflow?experiment=digits&run=first"  "wandb?experiment=digits"  "my_module:Tracker"
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

CSV, TENSORBOARD, MLFLOW, WANDB = "csv", "tensorboard", "mlflow", "wandb"
KINDS = (CSV, TENSORBOARD, MLFLOW, WANDB)
MAX_TRACKERS = 8
_OWN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIALS = re.compile(r"^[A-Za-z0-9+.-]+://[^/@\s]*@")
_ELSE = " (mlflow, wandb); empty: as their variables say where the master runs"
_OPTIONS = ("uri", "experiment", "run")


class Tracker(BaseModel):
    """`kind`: csv, tensorboard, mlflow, wandb, or `pkg.mod:Name`, a class or function that gives a tracker of one's own.
    Of mlflow and wandb, "" being what their own environment variables say: `uri` of the server, without credentials; `experiment`
    (wandb: project); `run`, the name of the run. As a text: `mlflow?experiment=digits&run=first`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(
        max_length=200, description="csv, tensorboard, mlflow, wandb, or pkg.mod:Name for one of your own."
    )
    uri: str = Field(default="", max_length=2000, description=f"The server, without credentials{_ELSE}.")
    experiment: str = Field(default="", max_length=200, description=f"Experiment or project{_ELSE}, or the job's name.")
    run: str = Field(default="", max_length=200, description=f"Name of the run{_ELSE}, or the job's name.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        kind, _, options = value.strip().partition("?")
        given: dict[str, Any] = dict(parse_qsl(options))
        if options and not given:
            msg = f"{value!r}: write options as {kind}?name=value&name=value; names are {', '.join(_OPTIONS)}"
            raise ValueError(msg)
        return {**given, "kind": kind}

    @field_validator("kind")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in KINDS and not _OWN.fullmatch(value):
            msg = f"there is no tracker {value!r}; there are {', '.join(KINDS)}, and pkg.mod:Name for one of your own"
            raise ValueError(msg)
        return value

    @field_validator("uri")
    @classmethod
    def _has_no_credentials(cls, value: str) -> str:
        if _CREDENTIALS.match(value):
            raise ValueError(
                "uri has credentials, which the job's settings would show to everyone who may read them; leave them out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (wandb: WANDB_API_KEY) where the master runs"
            )
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> Tracker:
        given = [name for name in _OPTIONS if getattr(self, name)]
        if given and self.kind not in (MLFLOW, WANDB):
            msg = f"the tracker {self.kind} has no {given[0]}; {', '.join(_OPTIONS)} are of mlflow and wandb"
            raise ValueError(msg)
        return self

    @property
    def is_own(self) -> bool:
        """Whether it is the user's."""
        return self.kind not in KINDS
