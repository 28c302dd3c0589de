"""Names of other systems' command lines: those that mean the same give the same job, the others an error that
names ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trireme.cli.app import app
from trireme.cli.other_systems import ACCEPTED, PAGE, REFUSED, OtherNameError, translated
from trireme.settings import SETTINGS, from_flags, from_set, job_spec, merge
from trireme_shared.protocol.records.datasets import Npy

PAGE_TEXT = Path(PAGE).read_text(encoding="utf-8")
SAME = [
    ("--num_workers 3", "--trainers 3"),
    ("--num_workers=3", "--trainers 3"),
    ("--num_ps_pods 2", "--pservers 2"),
    ("--num_epochs 5", "--epochs 5"),
    ("--job_name a", "--job a"),
    ("--get_model_steps 4", "--pull-every 4"),
    ("--evaluation_steps 50", "--set evaluate_every=50"),
    ("--evaluation_steps 0", "--set evaluate_every=off"),
    ("--checkpoint_steps 100", "--set checkpoint_every_steps=100"),
    (
        "--checkpoint_steps 0",
        (
            "--set checkpoint_every_steps=off --set checkpoint_every_epochs=off --set "
            "checkpoint_every_seconds=off"
        ),
    ),
    ("--keep_checkpoint_max 7", "--set keep_checkpoints=7"),
    ("--use_async", "--mode async"),
    ("--use_async True", "--mode async"),
    ("--use_async=false", "--mode sync"),
    ("--mode async --lr_staleness_modulation", "--mode async --set lr_staleness_modulation=true"),
    ("--mode async --lr_staleness_modulation=False", "--mode async --set lr_staleness_modulation=false"),
    ("--distribution_strategy AllreduceStrategy", "--strategy collective"),
    ("--distribution_strategy ParameterServerStrategy", "--strategy parameter_server"),
    ("--restart_policy Never", "--restart-policy never"),
    ("--restart_policy OnFailure", "--restart-policy on_failure"),
    ("--restart_policy Always", "--restart-policy always"),
    ("--trainer_num 2", "--trainers 2"),
    ("--worker_num 2", "--trainers 2"),
    ("--nproc_per_node 2", "--trainers 2"),
    ("--server_num 3", "--pservers 3"),
    ("--job_id a", "--job a"),
    ("--run_mode collective", "--strategy collective"),
    ("--run_mode ps", "--strategy parameter_server"),
    ("--num_passes 9", "--epochs 9"),
    ("--num_gradient_servers 4", "--trainers 4"),
    ("--saving_period 2", "--set checkpoint_every_epochs=2"),
    ("--saving_period_by_batches 30", "--set checkpoint_every_steps=30"),
]
RUN: Any = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]


def _name(theirs: str) -> str:
    return next(name for name in re.findall(r"--\w+", theirs) if name in ACCEPTED)


def spec_of(words: str) -> Any:
    """As `trireme run` makes it of its command line."""
    given = RUN.make_context("run", ["script.py", *words.split()]).params
    flags = {name: value for name, value in given.items() if name in SETTINGS}
    settings = merge([from_flags(flags), from_set(given["assignments"] or ())])
    fixed: dict[str, Any] = {"script": "script.py", "storage": "/s", "dataset": Npy("x", "y", aligned=True)}
    if "evaluate_every" in words or "evaluation_steps" in words:
        fixed["evaluation_dataset"] = fixed["dataset"]
    return job_spec(settings, **({} if "job" in settings else {"job": "j"}), **fixed)


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_a_name_that_means_the_same_gives_the_same_spec_and_one_line_with_ours(theirs, ours, capsys):
    assert spec_of(theirs) == spec_of(ours)
    name = _name(theirs)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"{name} is an option of {ACCEPTED[name].system}; ours is --")


def test_all_that_are_accepted_were_tried():
    assert {_name(theirs) for theirs, _ in SAME} == set(ACCEPTED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--grads_to_wait 2",
            r"--grads_to_wait is an option of ElasticDL: in a synchronous job every step waits .*push-every",
        ),
        ("--minibatch_size=64", r"--minibatch_size is an option of ElasticDL: .*--global-batch-size"),
        ("--training_data /d", r"dataset\(\) in the script"),
        (
            "--distribution_strategy Local",
            "Local is an option of ElasticDL: one process without a cluster is `python SCRIPT`",
        ),
        (
            "--distribution_strategy Horovod",
            "expected one of ParameterServerStrategy, AllreduceStrategy, Local",
        ),
        ("--keep_checkpoint_max 0", "0 keeps all there; here keep_checkpoints is 1 to 100"),
        ("--use_async=perhaps", "expected true or false"),
        ("--nnodes 2:4", "an option of paddle.distributed.launch: trireme run is one machine.*--min-members"),
        ("--trainer_count 4", "an option of paddle train: .*threads_per_trainer"),
        ("--num_workers", "--num_workers needs a value"),
        ("--trainers 2 --num_workers 3", "--num_workers is --trainers 3 here, which is given as well"),
        ("--trainer_num 2 --num_workers 3", "--num_workers is --trainers 3 here, which is given as well"),
        ("--set keep_checkpoints=3 --keep_checkpoint_max 4", "which is given as well"),
        ("--set=trainers=1 --num_workers 2", "--num_workers is --trainers 2 here, which is given as well"),
        ("--use_async true --set mode=sync", "--use_async is --mode async here, which is given as well"),
    ],
)
def test_a_name_without_the_same_meaning_is_an_error_that_names_ours(words, message):
    with pytest.raises(OtherNameError, match=message) as error:
        translated(words.split())
    assert str(error.value).endswith(f"({PAGE})")


def test_the_command_ends_with_exit_code_2_and_one_line():
    result = CliRunner().invoke(app, ["run", "script.py", "--grads_to_wait", "2"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --grads_to_wait is an option of ElasticDL")
    assert len(result.stderr.splitlines()) == 1


def test_our_names_stay_as_they_are():
    words = [
        "script.py",
        "--trainers",
        "2",
        "--set",
        "lanes=4",
        "--restart-policy",
        "never",
        "--host=127.0.0.1",
    ]
    assert translated(words) == (words, [])
    own = {option for parameter in RUN.params for option in parameter.opts}
    assert not own & (ACCEPTED.keys() | REFUSED.keys())


def test_the_help_shows_ours_alone_and_names_the_page():
    text = CliRunner().invoke(app, ["run", "--help"]).output
    assert PAGE in text
    assert not [name for name in (*ACCEPTED, *REFUSED) if re.search(rf"{name}\b(?!-)", text)]


def test_the_page_has_each_name():
    listed = set(re.findall(r"`(--\w+)", PAGE_TEXT))
    assert (ACCEPTED.keys() | REFUSED.keys()) - listed == set()
