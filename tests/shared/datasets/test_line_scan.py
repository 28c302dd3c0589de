"""Where records begin and end, against Python's own csv module and plain splitting, in pieces of any size."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme_shared.datasets.line_scan import RecordScanner
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, JsonLines, TextLines

PIECES = st.integers(1, 17)
LINES = st.lists(st.text(alphabet='ab é\t\r"{', max_size=5), max_size=12)


def scan(dataset, content: bytes, piece: int, start: int = 0) -> list[bytes]:
    scanner = RecordScanner(dataset, "file", start)
    spans = []
    for place in range(start, len(content), piece):
        starts, ends = scanner.feed(content[place : place + piece])
        spans += zip(starts.tolist(), ends.tolist(), strict=True)
    last = scanner.finish()
    if last is not None:
        spans.append(last)
    return [content[first:last] for first, last in spans]


@st.composite
def csv_files(draw):
    """Bytes of a CSV file with quoted line breaks, doubled quotes and blank lines; every row has as many
    fields."""
    columns = draw(st.integers(1, 3))
    rows = draw(
        st.lists(
            st.lists(st.text(alphabet='a,"\n\r é', max_size=4), min_size=columns, max_size=columns),
            max_size=10,
        )
    )
    end = draw(st.sampled_from(["\n", "\r\n"]))
    text = ""
    for row in rows:
        text += end * draw(st.integers(0, 2))
        fields = []
        for field in row:
            must = set(field) & set(',"\n\r') or field == ""
            fields.append('"' + field.replace('"', '""') + '"' if must or draw(st.booleans()) else field)
        text += ",".join(fields) + end
    if draw(st.booleans()):
        text = text.removesuffix("\n").removesuffix("\r")
    return text.encode(), rows


@given(csv_files(), PIECES)
def test_csv_records_are_those_of_pythons_csv_module(file, piece):
    content, rows = file
    found = scan(Csv("x", column_names=("a",)), content, piece)
    parsed = [next(csv.reader(io.StringIO(record.decode(), newline=""))) for record in found]
    assert parsed == rows


@given(LINES, st.booleans(), PIECES)
def test_text_lines_are_what_split_gives(lines, newline_at_end, piece):
    content = ("\n".join(lines) + ("\n" if newline_at_end and lines else "")).encode()
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert scan(TextLines("x"), content, piece) == expected


@given(LINES, PIECES)
def test_json_lines_are_the_lines_that_are_not_blank(lines, piece):
    content = "\n".join(lines).encode()
    assert scan(JsonLines("x"), content, piece) == [line for line in content.split(b"\n") if line.strip()]


@given(csv_files(), PIECES, st.data())
def test_scanning_from_a_records_start_gives_the_rest(file, piece, data):
    content, _ = file
    dataset = Csv("x", column_names=("a",))
    scanner = RecordScanner(dataset, "file")
    starts = scanner.feed(content)[0].tolist()
    if not starts:
        return
    chosen = data.draw(st.integers(0, len(starts) - 1))
    assert scan(dataset, content, piece, starts[chosen]) == scan(dataset, content, len(content))[chosen:]


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_a_quote_inside_an_unquoted_field_is_refused_with_its_byte(piece):
    with pytest.raises(DatasetError, match="file: byte 9 is a quote inside an unquoted field"):
        scan(Csv("x"), b'a,b\n1,3 5" disk\n2,x\n', piece)


@pytest.mark.parametrize("piece", [1, 100])
def test_a_quote_that_is_never_closed_is_refused_with_its_record(piece):
    with pytest.raises(DatasetError, match="file: the record at byte 4 opens a quote that is never closed"):
        scan(Csv("x"), b'a,b\n1,"x\n2,y\n', piece)


def test_another_delimiter_may_stand_before_a_quote():
    assert scan(Csv("x", delimiter=";"), b'1;"a;\nb"\n', 2) == [b'1;"a;\nb"']
