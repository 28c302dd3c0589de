"""Which settings may change between two runs of a job: each is in one class, and in the table of
docs/again.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trireme.launch import resume
from trireme.launch.resume import Plan, PreviousRun, Start
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job_choices import AcceptedChange
from trireme_shared.protocol.records.setting_effects import ACCEPTED, FIXED, FREE, GROWS, renewed

DOCS = Path(__file__).parents[3] / "docs" / "again.md"
COMPLETED = {"phase": "COMPLETED", "reason": "trained, evaluated and exported"}


def spec_of(**values) -> JobSpec:
    return JobSpec(
        **({"job": "ctr", "script": "/s.py", "dataset": TextLines("t.txt"), "storage": "/data"} | values)
    )


def plan(before: JobSpec, now: JobSpec, result=None) -> Plan:
    previous = PreviousRun(before, "digest", result=result)
    return resume.decide(previous, now, "digest", Path("/runs/ctr"), fresh=False)


def test_each_setting_is_in_one_class_and_in_the_table():
    assert FREE | ACCEPTED | FIXED.keys() | {GROWS} == set(JobSpec.model_fields)
    assert len(FREE) + len(ACCEPTED) + len(FIXED) + 1 == len(JobSpec.model_fields)
    rows = re.findall(
        r"^\| (.*`.*) \| (yes|it may grow|with `--accept-changes`.*|no: .*) \|$",
        DOCS.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    told = {name: verdict.split(":")[0] for names, verdict in rows for name in re.findall(r"`(\w+)`", names)}
    assert {name for name, verdict in told.items() if verdict == "yes"} == FREE
    assert {name for name, verdict in told.items() if verdict == "no"} == FIXED.keys()
    assert {name for name, verdict in told.items() if verdict.startswith("with")} == ACCEPTED
    assert told[GROWS] == "it may grow"


@pytest.mark.parametrize(("before", "now"), [({"lanes": 8}, {"lanes": 4}), ({}, {"init_from": "a.pt"})])
def test_what_is_fixed_is_refused_with_both_values_and_the_reason(before, now):
    (name,) = now
    old, new = spec_of(**before), spec_of(**now)
    told = (
        rf"with {name} = {getattr(old, name)!r}; now {name} = {getattr(new, name)!r} is asked for: "
        rf"{FIXED[name]}"
    )
    with pytest.raises(Conflict, match=re.escape(told)):
        plan(old, new)


@pytest.mark.parametrize(
    ("before", "now"), [({"mode": "sync"}, {"mode": "async"}), ({"dispatch": "master"}, {"dispatch": "etcd"})]
)
def test_what_is_fixed_is_told_as_users_write_it(before, now):
    ((name, old),), ((_, new),) = before.items(), now.items()
    with pytest.raises(Conflict, match=rf"with {name} = '{old}'; now {name} = '{new}' is asked for: "):
        plan(spec_of(**before), spec_of(**now), COMPLETED)


def test_settings_that_change_no_bit_may_change():
    resumed = plan(spec_of(), spec_of(keep_checkpoints=5, lease_ttl_s=9.0, checkpoint_every_steps=10))
    assert resumed.start is Start.RESUME
    assert "2 -> 5 keep_checkpoints" in resumed.sentence


def test_more_epochs_go_on_and_fewer_are_refused():
    two, five = spec_of(epochs=2), spec_of(epochs=5)
    assert plan(two, five, COMPLETED) == Plan(
        Start.RESUME, "job ctr is completed: it goes on (2 -> 5 epochs)"
    )
    assert plan(two, five).sentence == "job ctr is unfinished: it resumes (2 -> 5 epochs)"
    for result in (None, COMPLETED):
        with pytest.raises(
            Conflict, match=r"epochs = 5; now epochs = 2 .*: a job can only get more epochs than its 5"
        ):
            plan(five, two, result)
    assert plan(two, two, COMPLETED).start is Start.DONE


def test_a_completed_job_with_more_epochs_needs_the_same_model_and_may_have_another_script():
    previous = PreviousRun(spec_of(epochs=2), "digest", {"tensors": [], "optimizer": {}}, COMPLETED)
    goes_on = resume.decide(previous, spec_of(epochs=5), "another", Path("/runs/ctr"), fresh=False)
    assert goes_on.sentence.endswith("(2 -> 5 epochs); s.py has changed since the job began")
    model = {"tensors": [["param", "w", [1], "torch.float32", 0]], "optimizer": {}}
    with pytest.raises(Conflict, match="is completed and its model has changed: parameter w"):
        resume.decide(previous, spec_of(epochs=5), "digest", Path("/runs/ctr"), fresh=False, model=model)


def test_more_epochs_are_refused_where_they_would_change_nothing_or_lose_some():
    two, five = spec_of(epochs=2), spec_of(epochs=5)
    with pytest.raises(Conflict, match="completed: stop_early ended the job at step 70") as caught:
        plan(two, five, COMPLETED | {"stopped_step": 70})
    assert "--init-from" in str(caught.value.hint)
    alone = {"mode": "async", "checkpoint_kind": "independent"}
    with pytest.raises(Conflict, match="independent: none of them holds its last parameters"):
        plan(spec_of(**alone, epochs=2), spec_of(**alone, epochs=5), COMPLETED)
    assert plan(spec_of(**alone, epochs=2), spec_of(**alone, epochs=5)).start is Start.RESUME


def test_the_spec_in_etcd_gets_what_may_change_and_keeps_members_and_epochs():
    stored = spec_of(trainers=7, epochs=9, seed=1)
    wanted = spec_of(trainers=2, epochs=3, seed=2, keep_checkpoints=4)
    assert renewed(stored, wanted) == stored.model_copy(update={"keep_checkpoints": 4})
    assert renewed(stored, spec_of(epochs=12, seed=1)).epochs == 12


def test_hyperparameters_in_etcd_change_only_with_a_change_that_was_accepted():
    stored, wanted = spec_of(), spec_of(clip_grad_norm=1.0, seed=2)
    assert renewed(stored, wanted) == stored
    change = AcceptedChange(number=1, options=0, time="2026-11-30T00:00:00Z", text="clip_grad_norm")
    accepted = renewed(stored, wanted.with_fields(history=(change,)))
    assert accepted == stored.with_fields(clip_grad_norm=1.0, history=(change,))
    assert renewed(accepted, stored) == accepted, "what an earlier run asked for does not undo it"
