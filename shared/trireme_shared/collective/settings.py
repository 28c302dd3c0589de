"""What a communicator is told by its maker, and what all members of a group must have been told alike."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1
GLOO, NCCL = "gloo", "nccl"
NATIVE, CANONICAL = "native", "canonical"


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds. `host`: the address at which other members reach this process. `transport_dtype`: "": each value's own."""

    host: str = "127.0.0.1"
    timeout_s: float = 60.0
    lease_ttl_s: float = 5.0
    min_members: int = 1
    reduction: str = NATIVE
    transport_dtype: str = ""
    backend: str = GLOO
    share_state: bool = True

    def manifest(self, size: int) -> dict[str, str]:
        return {
            "protocol": str(PROTOCOL),
            "members": str(size),
            "reduction": self.reduction,
            "transport_dtype": self.transport_dtype or "none",
            "backend": self.backend,
            "share_state": str(self.share_state),
        }
