"""Writes openapi.json: the document of a cluster's leader, which has every route. A test compares the file
with what the code gives."""

from __future__ import annotations

from pathlib import Path

from master_service.api.app import api_of
from master_service.api.openapi.documentation import text_of

OPENAPI = Path(__file__).parents[1] / "openapi.json"


def current() -> str:
    """As it should lie in OPENAPI."""
    return text_of(api_of(clustered=True).openapi())


if __name__ == "__main__":
    OPENAPI.write_text(current(), encoding="utf-8")
