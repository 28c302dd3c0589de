"""What the same command does about what an earlier run left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trireme.launch import resume
from trireme.launch.resume import Start
from trireme.launch.run_folder import write_json
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec


def spec_of(**values) -> JobSpec:
    return JobSpec(
        **({"job": "ctr", "script": "/s.py", "dataset": TextLines("t.txt"), "storage": "/data"} | values)
    )


def left(folder, spec, *, phase=None, script="digest", **result):
    """As a run leaves it that was killed, or ended in `phase` with `result`."""
    (folder / "etcd").mkdir()
    (folder / "spec.json").write_bytes(spec.to_bytes())
    resume.write_start(folder, script)
    if phase:
        write_json(folder / resume.RESULT_FILE, {"phase": phase, "reason": "it was said", **result})
    return resume.read_previous_run(folder)


def decide(previous, spec, folder, *, script="digest", fresh=False):
    return resume.decide(previous, spec, script, folder, fresh=fresh)


def test_a_first_start_says_nothing(tmp_path):
    assert decide(resume.read_previous_run(tmp_path), spec_of(), tmp_path) == resume.Plan(Start.NEW)


def test_an_unfinished_job_goes_on_with_any_number_of_members(tmp_path):
    previous = left(tmp_path, spec_of(trainers=2, pservers=1))
    plan = decide(previous, spec_of(trainers=2, pservers=3), tmp_path)
    assert plan == resume.Plan(Start.RESUME, "job ctr is unfinished: it resumes (1 -> 3 pservers)")


def test_a_changed_script_is_told_when_a_job_goes_on(tmp_path):
    plan = decide(left(tmp_path, spec_of()), spec_of(), tmp_path, script="another")
    told = "job ctr is unfinished: it resumes; s.py has changed since the job began"
    assert plan.sentence == told
    before = resume.PreviousRun(spec_of(sources={"s.py": "1", "module.py": "2"}), "digest")
    module = spec_of(sources={"s.py": "1", "module.py": "3"})
    assert decide(before, module, tmp_path) == resume.Plan(Start.RESUME, told), (
        "a module beside it counts, too"
    )
    assert decide(before, before.spec, tmp_path).sentence == "job ctr is unfinished: it resumes"


@pytest.mark.parametrize("phase", [None, "COMPLETED"])
def test_other_settings_are_refused_with_both_values_and_what_to_do(tmp_path, phase):
    previous = left(tmp_path, spec_of(seed=2), phase=phase)
    what = "completed" if phase else "unfinished"
    with pytest.raises(
        Conflict, match=rf"ctr in .* is {what} with seed = 2; now seed = 5 is asked for"
    ) as caught:
        decide(previous, spec_of(seed=5), tmp_path)
    assert "--job NAME" in caught.value.hint
    assert "--fresh" in caught.value.hint


def table(name: str, dim: int = 16, lr: float = 0.1) -> dict[str, Any]:
    made = TableSpec(
        name=name, dim=dim, optimizer=RowOptimizer(kind="adam", lr=lr), init=RowInit(kind="constant", scale=0)
    )
    return made.model_dump(mode="json")


MODEL = {
    "tables": [table("user")],
    "tensors": [
        ["param", "0.weight", [16, 8], "torch.float32", 0],
        ["param", "0.bias", [16], "torch.float32", 0],
    ],
    "optimizer": {
        "name": "Adam",
        "defaults": {"lr": 0.1, "fused": None},
        "groups": [{"lr": 0.1, "nesterov": False}],
    },
    "scheduler": {"name": "StepLR", "state": {"step_size": 5, "gamma": 0.5, "base_lrs": [0.1]}},
}


def test_a_model_whose_parts_only_changed_their_order_is_told_so_and_what_changes_it(tmp_path):
    left(tmp_path, spec_of())
    resume.write_start(tmp_path, "digest", MODEL)
    previous, reordered = resume.read_previous_run(tmp_path), MODEL | {"tensors": MODEL["tensors"][::-1]}
    with pytest.raises(Conflict) as caught:
        resume.decide(previous, spec_of(), "digest", tmp_path, fresh=False, model=reordered)
    assert (
        "the same parameters and buffers are in another order (0.bias is where 0.weight was)"
        in caught.value.message
    )
    assert "made from a set of names change their order with PYTHONHASHSEED" in caught.value.hint
    assert "restore the script" not in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"tensors": [["param", "0.weight", [32, 8], "torch.float32", 0], MODEL["tensors"][1]]},
            "parameter 0.weight was float32 [16, 8], now it is float32 [32, 8]",
        ),
        ({"tensors": MODEL["tensors"][:1]}, "parameter 0.bias float32 [16] does not exist any more"),
        (
            {"tensors": [*MODEL["tensors"], ["buffer", "1.mean", [], "torch.int64", -1]]},
            "buffer 1.mean int64 [] is new",
        ),
        (
            {"tensors": [*MODEL["tensors"][:1], ["first", "queue", [16], "torch.float32", -1]]},
            "parameter 0.bias float32 [16] was in the place of buffer queue float32 [16]",
        ),
        (
            {"tensors": [["param", "1.weight", [16, 8], "torch.float32", 0], MODEL["tensors"][1]]},
            "parameter 0.weight float32 [16, 8] was in the place of parameter 1.weight float32 [16, 8]",
        ),
        (
            {"tensors": [[*MODEL["tensors"][0], [1, 16]], MODEL["tensors"][1]]},
            "parameter 0.weight was contiguous, now it is laid out with strides [1, 16]",
        ),
        (
            {"optimizer": {"name": "SGD", "defaults": {}, "groups": []}},
            "the optimizer was Adam, now it is SGD",
        ),
        (
            {"optimizer": MODEL["optimizer"] | {"groups": [{"lr": 0.1, "nesterov": True}]}},
            "the optimizer's nesterov was False, now it is True (group 0)",
        ),
        (
            {"optimizer": {"name": "RMSprop", "defaults": {}, "groups": [{"momentum": 0.9}]}},
            "the optimizer was Adam, now it is RMSprop",
        ),
        (
            {"tables": [table("item")]},
            "embedding table user does not exist any more and embedding table item is new",
        ),
        ({"tables": [table("user", dim=8)]}, "dim of embedding table user was 16, now it is 8"),
        ({"tables": [table("user", lr=0.2)]}, "optimizer.lr of embedding table user was 0.1, now it is 0.2"),
    ],
)
def test_an_unfinished_job_whose_model_or_optimizer_changed_is_refused_and_left_as_it_is(
    tmp_path, changed, message
):
    left(tmp_path, spec_of())
    resume.write_start(tmp_path, "digest", MODEL)
    previous = resume.read_previous_run(tmp_path)
    with pytest.raises(Conflict) as caught:
        resume.decide(
            previous, spec_of(), "another", tmp_path, fresh=False, accept=True, model=MODEL | changed
        )
    assert caught.value.message == f"job ctr in {tmp_path} is unfinished and its model has changed: {message}"
    assert "restore the script" in caught.value.hint
    assert resume.read_previous_run(tmp_path) == previous
    unknown = {name: facts for name, facts in MODEL.items() if name != "tables"}
    for model in (
        MODEL,
        None,
        unknown,
        MODEL | {"optimizer": MODEL["optimizer"] | {"defaults": {"lr": 0.1, "new": 1}}},
    ):
        assert (
            resume.decide(previous, spec_of(), "digest", tmp_path, fresh=False, model=model).start
            is Start.RESUME
        )
    fresh = resume.decide(previous, spec_of(), "another", tmp_path, fresh=True, model=MODEL | changed)
    assert fresh.start is Start.NEW


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            "buffer",
            "first",
            "took the mean over the lanes, now the script's `buffers` gives it the value of the",
        ),
        ("first", "buffer", "took the value of the first lane, now the script's `buffers` gives it the mean"),
    ],
)
def test_another_policy_for_a_buffer_is_told_as_such(then, now, message):
    before, after = (
        MODEL | {"tensors": [*MODEL["tensors"], [kind, "queue", [16], "torch.float32", -1]]}
        for kind in (then, now)
    )
    assert resume.difference(before, after).startswith(f"buffer queue {message}")


def test_a_completed_job_is_left_as_it_is(tmp_path):
    previous = left(tmp_path, spec_of(), phase="COMPLETED")
    assert decide(previous, spec_of(), tmp_path).start is Start.DONE
    with pytest.raises(Conflict, match="completed with another version of"):
        decide(previous, spec_of(), tmp_path, script="another")


def test_a_failed_job_starts_from_the_beginning_and_says_where_the_old_one_is(tmp_path):
    previous = left(tmp_path, spec_of(), phase="FAILED")
    plan = decide(previous, spec_of(epochs=9), tmp_path)
    assert plan.start is Start.NEW
    assert plan.sentence.startswith("job ctr failed before (it was said); it starts from the beginning")


def test_a_job_that_failed_for_lack_of_members_goes_on_and_only_with_the_same_settings(tmp_path):
    previous = left(tmp_path, spec_of(pservers=1), phase="FAILED", resumable=True)
    plan = decide(previous, spec_of(pservers=2), tmp_path)
    assert plan.start is Start.RESUME
    assert plan.sentence == "job ctr failed before (it was said): it resumes (1 -> 2 pservers)"
    with pytest.raises(Conflict, match="seed = 0; now seed = 5 is asked for"):
        decide(previous, spec_of(seed=5), tmp_path)
    assert decide(previous, spec_of(seed=5), tmp_path, fresh=True).start is Start.NEW


def test_an_unfinished_asynchronous_job_goes_on_and_independent_checkpoints_need_as_many_pservers(tmp_path):
    unfinished = resume.PreviousRun(spec_of(mode="async", pservers=2), "digest")
    plan = decide(unfinished, spec_of(mode="async", pservers=3), tmp_path)
    assert plan.sentence == "job ctr is unfinished: it resumes (2 -> 3 pservers)"
    alone = {"mode": "async", "checkpoint_kind": "independent"}
    unfinished = resume.PreviousRun(spec_of(**alone, pservers=2), "digest")
    assert decide(unfinished, spec_of(**alone, pservers=2, trainers=5), tmp_path).start is Start.RESUME
    with pytest.raises(
        Conflict, match=r"with 2 parameter servers, 3 are asked for: independent .* as many"
    ) as caught:
        decide(unfinished, spec_of(**alone, pservers=3), tmp_path)
    assert "--pservers 2" in caught.value.hint


def test_fresh_starts_from_the_beginning_whatever_there_is(tmp_path):
    for phase in ("COMPLETED", "FAILED", None):
        result = {"phase": phase, "reason": ""} if phase else None
        previous = resume.PreviousRun(spec_of(), "digest", result=result)
        assert decide(previous, spec_of(epochs=7), tmp_path, fresh=True).start is Start.NEW


def test_what_was_there_is_kept_once_under_previous(tmp_path):
    for number in range(3):
        (tmp_path / "lock").touch()
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "part").write_text(str(number))
        (tmp_path / "spec.json").write_text(json.dumps(number))
        resume.set_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "previous"]
    assert (tmp_path / "previous" / "checkpoints" / "part").read_text() == "2"


def test_unreadable_previous_count_as_none(tmp_path):
    (tmp_path / "etcd").mkdir()
    (tmp_path / "spec.json").write_text("{broken")
    assert resume.read_previous_run(tmp_path) == resume.PreviousRun()


def options(lr: float, **others: Any) -> dict[str, Any]:
    """The optimizer of MODEL with other options, and the scheduler that is made of it."""
    made = MODEL["optimizer"] | {"groups": [MODEL["optimizer"]["groups"][0] | {"lr": lr} | others]}
    scheduler = {"name": "StepLR", "state": MODEL["scheduler"]["state"] | {"base_lrs": [lr]}}
    return MODEL | {"optimizer": made, "scheduler": scheduler}


STEPS = {"scheduler": {"name": "StepLR", "state": {"step_size": 7, "gamma": 0.5, "base_lrs": [0.1]}}}
HYPERPARAMETERS = [
    ({"clip_grad_norm": 1.0}, MODEL, "clip_grad_norm None -> 1.0", False),
    ({"global_batch_size": 512}, MODEL, "global_batch_size 256 -> 512", False),
    ({"schedule_per": "epoch"}, MODEL, "schedule_per 'step' -> 'epoch'", True),
    ({}, options(0.2), "optimizer lr 0.1 -> 0.2", True),
    ({}, MODEL | STEPS, "scheduler step_size 5 -> 7", True),
    ({}, MODEL | {"scheduler": {}}, "scheduler 'StepLR' -> 'none'", True),
]


@pytest.mark.parametrize(("settings", "model", "told", "of_options"), HYPERPARAMETERS)
def test_other_hyperparameters_are_refused_with_both_values_and_go_on_if_they_are_accepted(
    tmp_path, settings, model, told, of_options
):
    left(tmp_path, spec_of())
    resume.write_start(tmp_path, "digest", MODEL)
    previous = resume.read_previous_run(tmp_path)
    with pytest.raises(Conflict) as caught:
        resume.decide(previous, spec_of(**settings), "digest", tmp_path, fresh=False, model=model)
    assert f"is unfinished, and a change is asked for: {told}; the steps" in caught.value.message
    assert "--accept-changes goes on from the last checkpoint" in caught.value.hint
    plan = resume.decide(
        previous, spec_of(**settings), "digest", tmp_path, fresh=False, accept=True, model=model
    )
    sentence = f"job ctr is unfinished: it resumes ({told})"
    assert plan == resume.Plan(Start.RESUME, sentence, (told,), of_options)


def test_all_changes_are_named_together_also_where_one_of_them_is_not_possible(tmp_path):
    left(tmp_path, spec_of(mode="async"))
    resume.write_start(tmp_path, "digest", MODEL)
    previous, model = resume.read_previous_run(tmp_path), options(0.2, nesterov=False)
    now = spec_of(mode="async", clip_grad_norm=1.0, pull_every=4)
    with pytest.raises(Conflict) as caught:
        resume.decide(previous, now, "digest", tmp_path, fresh=False, model=model)
    assert (
        "3 changes are asked for: pull_every 1 -> 4, clip_grad_norm None -> 1.0, optimizer lr 0.1 -> 0.2"
        in caught.value.message
    )
    assert caught.value.details["differing"] == ["pull_every", "clip_grad_norm", "optimizer lr"]
    with pytest.raises(Conflict, match=r"seed = 0; now seed = 5 .*\(and 1 more: pull_every 1 -> 4\)"):
        decide(previous, spec_of(mode="async", seed=5, pull_every=4), tmp_path)


def test_changes_that_a_job_cannot_take_are_refused_although_they_are_accepted(tmp_path):
    plateau = {"scheduler": {"name": "ReduceLROnPlateau", "state": {"factor": 0.1}}}
    previous = resume.PreviousRun(spec_of(), "digest", MODEL | plateau)
    with pytest.raises(Conflict, match="ReduceLROnPlateau follows the evaluations that were made") as caught:
        resume.decide(
            previous, spec_of(), "digest", tmp_path, fresh=False, accept=True, model=options(0.2) | plateau
        )
    assert "--init-from JOB" in caught.value.hint
    clipped = spec_of(clip_grad_norm=1.0)
    taken = resume.decide(
        previous, clipped, "digest", tmp_path, fresh=False, accept=True, model=MODEL | plateau
    )
    assert taken.start is Start.RESUME, "its rate stays what it is"
    unfinished = resume.PreviousRun(spec_of(mode="async"), "digest")
    with pytest.raises(Conflict, match="ledgers of an asynchronous job count minibatches of the old size"):
        resume.decide(
            unfinished,
            spec_of(mode="async", global_batch_size=8),
            "digest",
            tmp_path,
            fresh=False,
            accept=True,
        )


def test_with_more_epochs_a_schedule_keeps_its_length_and_says_so_unless_changes_are_accepted(tmp_path):
    previous = resume.PreviousRun(spec_of(), "digest", MODEL)
    longer = resume.decide(previous, spec_of(epochs=3), "digest", tmp_path, fresh=False, model=MODEL | STEPS)
    assert longer.accepted == ()
    assert longer.sentence.endswith(
        "its scheduler keeps step_size 5, and --accept-changes takes the new values"
    )
    taken = resume.decide(
        previous, spec_of(epochs=3), "digest", tmp_path, fresh=False, accept=True, model=MODEL | STEPS
    )
    assert taken.accepted == ("scheduler step_size 5 -> 7",)


@pytest.mark.parametrize(
    ("name", "option", "before", "after", "may_change"),
    [
        ("RMSprop", "momentum", 0, 0.9, False),
        ("RMSprop", "momentum", 0.5, 0.9, True),
        ("SGD", "momentum", 0, 0.9, True),
        ("Adagrad", "initial_accumulator_value", 0.0, 0.1, False),
        ("Adam", "amsgrad", False, True, False),
        ("Adam", "fused", None, True, False),
        ("Adam", "betas", [0.9, 0.99], [0.8, 0.99], True),
    ],
)
def test_options_that_no_step_takes_up_are_refused_although_they_are_accepted(
    name, option, before, after, may_change
):
    then, now = (
        MODEL | {"optimizer": {"name": name, "defaults": {}, "groups": [{option: value}]}}
        for value in (before, after)
    )
    previous = resume.PreviousRun(spec_of(), "digest", then)
    if may_change:
        taken = resume.decide(previous, spec_of(), "digest", Path("/"), fresh=False, accept=True, model=now)
        assert taken.accepted == (f"optimizer {option} {before!r} -> {after!r}",)
        return
    with pytest.raises(
        Conflict, match=re.escape(f"the optimizer's {option} was {before!r}, now it is {after!r}")
    ):
        resume.decide(previous, spec_of(), "digest", Path("/"), fresh=False, accept=True, model=now)


def test_options_of_single_groups_are_named_with_their_number():
    before, after = (
        ({"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}),
        ({"lr": 0.3, "eps": 1e-6}, {"lr": 0.2, "eps": 1e-6}),
    )
    then, now = ({"optimizer": MODEL["optimizer"] | {"groups": list(groups)}} for groups in (before, after))
    previous = resume.PreviousRun(spec_of(), "digest", MODEL | then)
    plan = resume.decide(
        previous, spec_of(), "digest", Path("/runs"), fresh=False, accept=True, model=MODEL | now
    )
    assert plan.accepted == ("optimizer lr (group 0) 0.1 -> 0.3", "optimizer eps 1e-08 -> 1e-06")


def test_the_history_counts_changes_and_knows_the_last_one_of_the_optimizer():
    spec = spec_of()
    for number, of_options in enumerate([False, True, False], 1):
        plan = resume.Plan(Start.RESUME, "", (f"change {number}",), of_options)
        spec = resume.accepted_in(spec_of(), spec.history, plan, "2026-11-30T00:00:00Z")
    assert [(each.number, each.options, each.text) for each in spec.history] == [
        (1, 0, "change 1"),
        (2, 2, "change 2"),
        (3, 2, "change 3"),
    ]
    assert (spec.accepted, spec.options_change) == (3, 2)
    nothing = resume.accepted_in(spec_of(), spec.history, resume.Plan(Start.RESUME), "")
    assert nothing.history == spec.history
    for number in range(4, 40):
        plan = resume.Plan(Start.RESUME, "", ("x" * 5000,), False)
        spec = resume.accepted_in(spec_of(), spec.history, plan, f"time {number}")
    assert (len(spec.history), spec.accepted, spec.options_change) == (32, 39, 2)
    assert spec == JobSpec.from_bytes(spec.to_bytes())


def test_another_class_of_scheduler_is_refused_with_more_epochs_too_unless_it_is_accepted(tmp_path):
    previous = resume.PreviousRun(spec_of(), "digest", MODEL)
    cosine = MODEL | {"scheduler": {"name": "CosineAnnealingLR", "state": {"T_max": 9}}}
    told = "a change is asked for: scheduler 'StepLR' -> 'CosineAnnealingLR'"
    with pytest.raises(Conflict, match=told):
        resume.decide(previous, spec_of(epochs=3), "digest", tmp_path, fresh=False, model=cosine)
    taken = resume.decide(
        previous, spec_of(epochs=3), "digest", tmp_path, fresh=False, accept=True, model=cosine
    )
    assert taken.options


def test_a_batch_of_another_size_is_refused_if_the_scheduler_is_made_for_the_steps_of_the_job(tmp_path):
    counting = MODEL | {"scheduler": MODEL["scheduler"] | {"counts_steps": True}}
    previous, now = resume.PreviousRun(spec_of(), "digest", counting), spec_of(global_batch_size=512)
    with pytest.raises(Conflict, match="those that are done had other batches") as caught:
        resume.decide(previous, now, "digest", tmp_path, fresh=False, accept=True, model=counting)
    assert "give the scheduler a number of steps of your own" in caught.value.hint


def test_of_a_completed_job_that_is_not_trained_any_more_the_model_is_not_compared(tmp_path):
    previous = resume.PreviousRun(
        spec_of(), "digest", MODEL, {"phase": "COMPLETED", "reason": "it was trained"}
    )
    other = MODEL | {"tensors": MODEL["tensors"][::-1]}
    assert (
        resume.decide(previous, spec_of(), "digest", tmp_path, fresh=False, model=other).start is Start.DONE
    )
    with pytest.raises(Conflict, match=r"optimizer lr 0\.1 -> 0\.2; the steps that are done") as caught:
        resume.decide(previous, spec_of(), "another", tmp_path, fresh=False, model=options(0.2))
    assert "--accept-changes with more --epochs goes on" in caught.value.hint
    with pytest.raises(Conflict, match="it is not trained any more, so no change has an effect") as caught:
        resume.decide(previous, spec_of(), "another", tmp_path, fresh=False, accept=True, model=options(0.2))
    assert "give more --epochs" in caught.value.hint


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ({"_step_count": 1, "gamma": 0.1}, {"_step_count": 2, "gamma": 0.1}, ()),
        ({"base_lrs": [0.1]}, {"base_lrs": [0.3]}, ("scheduler base_lrs [0.1] -> [0.3]",)),
        ({"_milestones": [3]}, {"_milestones": [4]}, ("scheduler _milestones [3] -> [4]",)),
        (
            {"_schedulers": [{"gamma": 0.1, "_last_lr": [1]}, {"T_max": 4}]},
            {"_schedulers": [{"gamma": 0.1, "_last_lr": [2]}, {"T_max": 5}]},
            ("scheduler _schedulers.1.T_max 4 -> 5",),
        ),
        (
            {"groups": [{"max_lr": 0.1}]},
            {"groups": [{"max_lr": 0.2}]},
            ("scheduler groups.0.max_lr 0.1 -> 0.2",),
        ),
        ({"gamma": 0.1}, {"gamma": 0.1, "of_a_newer_torch": 3}, ()),
    ],
)
def test_of_a_scheduler_what_its_user_gives_it_is_compared(tmp_path, then, now, told):
    before, after = (MODEL | {"scheduler": {"name": "X", "state": state}} for state in (then, now))
    previous = resume.PreviousRun(spec_of(), "digest", before)
    plan = resume.decide(previous, spec_of(), "digest", tmp_path, fresh=False, accept=True, model=after)
    assert plan.accepted == told
