"""The command line speaks the user's language: groups of commands, options, settings and commands that do
not exist, names of jobs with underscores."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trireme.cli.app import app
from trireme.cli.options import CLUSTER, REPAIR, START, WATCH
from trireme_shared import __version__

COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_help_has_all_commands_in_four_groups_in_this_order():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    titles = re.findall(r"─ ([A-Z][\w ]+?) ─", shown)
    assert titles == ["Options", START, WATCH, CLUSTER, REPAIR]
    for name in COMMANDS:
        assert re.search(rf"│ {name} +", shown), name


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--lr", "there is no option --lr: the optimizer has it: give it in optimizer(model) of the script"),
        ("--records-per-task", "a setting without a flag of its own: use --set records_per_task=VALUE"),
        ("--batch-size", "there is no option --batch-size; did you mean --global-batch-size?"),
        ("--epohcs", "there is no option --epohcs; did you mean --epochs?"),
    ],
)
def test_options_that_do_not_exist_are_told_where_they_belong(command, option, told):
    for arguments in ([option, "3"], [f"{option}=3"]):
        result = CliRunner().invoke(app, [command, "script.py", *arguments])
        assert (result.exit_code, told in result.output) == (2, True), result.output
    shown = CliRunner().invoke(app, [command, "script.py", option, "3", "--json"])
    assert told in json.loads(shown.stdout)["error"]["message"]


def test_an_option_of_which_nothing_is_known_is_refused_as_typer_does():
    result = CliRunner().invoke(app, ["run", "script.py", "--colour-of-it"])
    assert (result.exit_code, "No such option: --colour-of-it" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("command", "arguments", "name"),
    [
        ("status", ["my_job"], "named"),
        ("export", ["--job", "my_job"], "job"),
        ("pause", ["my_job"], "job"),
        ("submit", ["s.py", "--after", "my_job"], "after"),
        ("tensorboard", ["my_job"], "jobs"),
    ],
)
def test_a_job_with_underscores_is_the_one_that_was_started_under_that_name(command, arguments, name):
    found = COMMANDS[command].make_context(command, arguments).params[name]
    assert (found[0] if isinstance(found, list | tuple) else found) == "my-job"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["stat"], "status"),
        (["sumbit", "script.py"], "submit"),
        (["checkpoint", "lst"], "list"),
        (["pool", "drian", "host-0-trainer-0"], "drain"),
    ],
)
def test_a_command_that_does_not_exist_is_told_with_the_one_that_is_meant(arguments, meant):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert re.search(rf"No such command .*Did you mean .*'{meant}'", result.output), result.output


def test_the_version_is_an_option_and_a_command():
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"trireme {__version__}\n")
    told = CliRunner().invoke(app, ["version", "--json"])
    assert json.loads(told.output)["trireme"] == __version__
