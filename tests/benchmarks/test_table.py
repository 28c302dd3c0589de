"""benchmarks.table: what a line says of a goal, who is not there, and minibatches that are the same in every
process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import table
from benchmarks.other_systems import environments
from benchmarks.tables.lines import Line, exactly, figure, markdown
from benchmarks.tables.minibatches import FILL, Minibatches
from benchmarks.tables.peers import PeerError, Process, paddle_environments

WORKER = """
import sys
from benchmarks.tables.replies import serve

print("this is no reply")

def fails(number):
    raise ValueError(f"not {number}")

serve({"double": lambda number: 2 * number, "fails": fails, "ends": lambda: sys.exit("enough")})
"""


def line(**changes):
    given = {"row": "lookup", "work": "lookup, tcp", "unit": "M ids/s", "ours": exactly(8.0), "goal": 6.0}
    return Line(**(given | changes))


def test_more_is_better_unless_said_otherwise():
    assert line().met is True
    assert line(goal=8.5).met is False
    assert line(higher=False).met is False
    assert line(higher=False, goal=8.0).met is True
    assert line(goal=None).met is None


def test_a_goal_over_a_peer_needs_the_peer():
    over = {"goal": 2.0, "over": "Paddle"}
    assert line(**over, peers={"Paddle": exactly(4.0)}).met is True
    assert line(**over, peers={"Paddle": exactly(4.1)}).met is False
    assert line(**over, peers={"Paddle": "not installed: ..."}).met is None


def test_ratios_say_how_many_times_better_ours_is():
    assert line(peers={"TFRA": exactly(2.0)}).ratio("TFRA") == 4.0
    assert line(peers={"TFRA": exactly(16.0)}, higher=False).ratio("TFRA") == 2.0
    assert line(peers={"TFRA": "ended"}).ratio("TFRA") is None


def test_the_table_has_a_row_for_a_peer_that_is_not_there():
    lines = [
        line(peers={"Paddle": "not installed: X", "torch": exactly(2.0)}, note="of 3 rows"),
        line(goal=99.0),
    ]
    head, _, first, second, empty, note = markdown(lines).splitlines()
    assert head == "| work | unit | ours | peers | ratio | goal | met |"
    assert (
        first
        == "| lookup, tcp | M ids/s | 8 | Paddle not installed: X; torch 2 | 4.00 x torch | >= 6 | yes |"
    )
    assert second == "| lookup, tcp | M ids/s | 8 |  |  | >= 99 | NO |"
    assert (empty, note) == ("", "- lookup, tcp: of 3 rows")


def test_a_line_as_json_has_numbers_and_reasons():
    found = json.loads(json.dumps(line(peers={"Paddle": "ended", "torch": exactly(4.0)}).as_json()))
    assert found["ours"] == {"median": 8.0, "quartiles": [8.0, 8.0]}
    assert (found["peers"]["Paddle"], found["ratios"]) == ("ended", {"Paddle": None, "torch": 2.0})
    assert (found["goal"], found["met"]) == (">= 6", True)


def test_a_figure_is_a_median_with_quartiles():
    assert str(figure([1.0, 2.0, 3.0, 4.0, 5.0])) == "3 (2-4)"
    assert str(figure([123.4])) == "123"


# ---------------------------------------------------------------- others


@pytest.fixture
def peers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_PEERS", str(tmp_path / "peers"))
    return tmp_path / "peers"


def test_a_system_that_is_not_installed_is_told_with_the_command(peers, tmp_path):
    assert environments.interpreter("paddle") is None
    with pytest.raises(PeerError, match=r"^not installed: python -m benchmarks\.other_systems paddle$"):
        Process("paddle", "paddle_table", {}, tmp_path, {0})
    assert not peers.exists()


def test_other_versions_than_those_that_are_named_are_not_installed(peers):
    mark = peers / "tfra" / environments.MARK
    mark.parent.mkdir(parents=True)
    mark.write_text("\n".join(environments.PACKAGES["tfra"]))
    assert environments.interpreter("tfra") == peers / "tfra" / "bin" / "python"
    mark.write_text("tensorflow-cpu==2.15.0")
    assert environments.interpreter("tfra") is None


def test_the_command_names_what_can_be_installed(peers, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["other_systems", "petuum"])
    with pytest.raises(SystemExit):
        environments.main()
    told = capsys.readouterr().err
    assert "invalid choice: 'petuum'" in told
    assert "paddle" in told


@pytest.fixture
def worker(tmp_path, monkeypatch):
    script = Path(environments.HERE) / "nobody.py"
    monkeypatch.setattr(environments, "interpreter", lambda _: Path(sys.executable))
    monkeypatch.setattr("benchmarks.tables.peers.script_of", lambda _: tmp_path / "worker.py")
    (tmp_path / "worker.py").write_text(WORKER)
    process = Process("paddle", script.stem, {}, tmp_path, {0, 1})
    yield process
    process.close()


def test_a_worker_answers_and_says_what_went_wrong(worker):
    assert [worker.ask("double", 4), worker.ask("double", "a")] == [8, "aa"]
    with pytest.raises(PeerError, match=r"^ValueError: not 3$"):
        worker.ask("fails", 3)
    assert worker.ask("double", 1) == 2
    assert worker.resident() > 1 << 20


def test_a_worker_that_ends_is_told_with_its_last_words(worker):
    with pytest.raises(PeerError, match=r"^ended with 1: enough$"):
        worker.ask("ends")
    with pytest.raises(PeerError, match=r"^ended with 1: enough$"):
        worker.check()


def test_a_worker_that_does_not_answer_is_waited_for_so_long(worker):
    with pytest.raises(PeerError, match=r"^no answer within 0\.05 s"):
        worker.end(0.05)


def test_paddles_processes_know_each_other():
    server, *trainers = paddle_environments(2)
    assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == f"127.0.0.1:{server['PADDLE_PORT']}"
    ports = [trainer["PADDLE_PORT"] for trainer in trainers]
    assert server["PADDLE_TRAINER_ENDPOINTS"] == ",".join(f"127.0.0.1:{port}" for port in ports)
    assert [trainer["PADDLE_TRAINER_ID"] for trainer in trainers] == ["0", "1"]
    assert len({server["PADDLE_PORT"], *ports}) == 3


# ---------------------------------------------------------------- what all of them work on


def test_minibatches_are_the_same_wherever_they_are_made():
    one, other = Minibatches(5000, 4, 1000), Minibatches(5000, 4, 1000)
    for number in (-1, 0, 7):
        assert np.array_equal(one.of(number), other.of(number))
        assert np.array_equal(one.few(number), other.few(number))
    assert np.array_equal(one.gradients(3), other.gradients(3))
    assert not np.array_equal(one.of(0), one.of(1))
    assert len(np.unique(one.few(0))) == 2000
    assert np.isin(one.of(0), one.all).all()


def test_pieces_are_all_rows_once():
    data = Minibatches(FILL + 10, 1, 10)
    assert [len(piece) for piece in data.pieces()] == [FILL, data.rows - FILL]
    assert np.array_equal(np.concatenate(data.pieces()), data.all)


def test_importing_minibatches_loads_nothing_but_numpy():
    heavy = ("torch", "numba", "trireme_shared", "pyarrow", "structlog")
    probe = (
        "import sys, benchmarks.tables.minibatches, benchmarks.tables.replies; print([m for m in "
        f"{heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows-of-table", "lookup,sleep"], "'sleep' is none of lookup, step, small, memory, save, deepfm"),
        (["--peers", "petuum"], "'petuum' is none of Paddle, TFRA, torch"),
        (["--rows", "0"], "--rows is 0: it must be at least 1"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["table", *arguments])
    with pytest.raises(SystemExit):
        table.main()
    assert said in capsys.readouterr().err


@pytest.mark.soak  # for its length
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_all_rows_of_ours_are_measured_and_peers_that_are_not_there_are_told(peers):
    command = [sys.executable, "-m", "benchmarks.table", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert [row["row"] for row in lines] == [
        *["lookup"] * 3,
        *["step"] * 3,
        *["small"] * 3,
        "memory",
        "save",
        "save",
        "deepfm",
        "deepfm",
    ]
    assert all(row["ours"]["median"] > 0 for row in lines if row["row"] != "save")
    for row in lines[:9]:
        assert row["peers"]["torch"]["median"] > 0
        assert row["peers"]["Paddle"] == environments.how_to_install("paddle")
        assert row["peers"]["TFRA"] == environments.how_to_install("tfra")
