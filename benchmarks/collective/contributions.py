"""What each member gives to an exchange, and the bits that everybody shall get."""

from __future__ import annotations

from typing import Any


def contribution(elements: int, place: int) -> Any:
    """float32 (elements,)."""
    import torch

    return torch.randn(elements, generator=torch.Generator().manual_seed(place))


def mean(elements: int, members: int) -> Any:
    """Of all contributions over the canonical tree, float32 (elements,)."""
    from trireme_shared.collective.operations import tree

    return tree([contribution(elements, place) for place in range(members)], [1.0] * members)


def differing(found: Any, members: int) -> int:
    """How many elements differ in a bit."""
    import torch

    expected = mean(found.numel(), members)
    return int((found.view(torch.int32) != expected.view(torch.int32)).sum())
