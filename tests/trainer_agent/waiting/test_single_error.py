"""One error out of a TaskGroup."""

from __future__ import annotations

import pytest

from shared.errors import Gone, PeerError, StaleGeneration, UserCodeError
from trainer_agent.waiting.single_error import single_error


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([PeerError("a"), Gone("b")], Gone),
        ([Gone("a"), UserCodeError("b")], UserCodeError),
        ([PeerError("a"), StaleGeneration("b")], StaleGeneration),
        ([UserCodeError("a"), ZeroDivisionError("a bug")], ZeroDivisionError),
        ([PeerError("a"), ExceptionGroup("inner", [PeerError("b"), Gone("c")])], Gone),
    ],
)
def test_the_most_serious_error_of_a_group_is_raised(errors, raised):
    with pytest.raises(raised), single_error():
        raise ExceptionGroup("several", errors)
