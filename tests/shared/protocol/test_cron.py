"""When cron expressions run, also where clocks are changed, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme_shared.protocol.cron import latest_time, next_time
from trireme_shared.protocol.times import instant, rfc3339

BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("expression", "zone", "after", "then"),
    [
        ("0 6 * * *", "UTC", "2027-01-15T06:00:00Z", "2027-01-16T06:00:00Z"),
        ("0 6 * * *", BERLIN, "2027-01-15T06:00:00Z", "2027-01-16T05:00:00Z"),
        # 02:30 does not exist on that day
        ("30 2 * * *", BERLIN, "2027-03-28T00:00:00Z", "2027-03-28T01:00:00Z"),
        ("30 2 * * *", BERLIN, "2027-10-31T00:30:00Z", "2027-11-01T01:30:00Z"),  # 02:30 was there once before
        ("*/15 * * * 1", "UTC", "2027-01-15T08:00:00Z", "2027-01-18T00:00:00Z"),
        ("0 0 29 2 *", "UTC", "2027-01-01T00:00:00Z", "2028-02-29T00:00:00Z"),
    ],
)
def test_the_next_time(expression, zone, after, then):
    assert rfc3339(next_time(expression, zone, instant(after))) == rfc3339(instant(then))


@given(
    st.sampled_from(["*/7 * * * *", "0 6 * * *", "30 2 * * *", "15 */5 * * 1-5", "0 0 31 * *"]),
    st.sampled_from(["UTC", BERLIN, "America/New_York"]),
    st.floats(1_500_000_000, 1_900_000_000),
)
def test_the_latest_time_is_the_next_one_of_the_time_before(expression, zone, now):
    latest = latest_time(expression, zone, now)
    assert latest <= now < next_time(expression, zone, latest)


@pytest.mark.parametrize(
    ("expression", "zone", "words"),
    [
        ("0 0 30 2 *", "UTC", "names a day that no month has"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("* * * *", "UTC", "it has 4 fields"),
        ("* * * * * *", "UTC", "it has 6 fields"),
        ("1," * 200 + "1 * * * *", "UTC", "409 characters"),
        ("0 0 * * *", "Atlantis/Capital", "time zone 'Atlantis/Capital' is not known"),
        ("0 0 * * *", "../etc/passwd", "is not known"),
    ],
)
def test_what_never_runs_is_refused(expression, zone, words):
    for ask in (next_time, latest_time):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")):
            ask(expression, zone, 0.0)
