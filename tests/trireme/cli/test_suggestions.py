"""The command line speaks the user's language: groups of commands, options and settings that do not exist,
names of jobs with underscores."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trireme.cli.app import app
from trireme.cli.options import CLUSTER, REPAIR, START, WATCH

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
    [("status", ["my_job"], "named"), ("export", ["--job", "my_job"], "job"), ("pause", ["my_job"], "job")],
)
def test_a_job_with_underscores_is_the_one_that_was_started_under_that_name(command, arguments, name):
    assert COMMANDS[command].make_context(command, arguments).params[name] == "my-job"
