"""The spec of a simulated job."""

from __future__ import annotations

from tests.simulation.checkpoint_checker import STORAGE
from tests.simulation.compute import BLOCK_BYTES
from tests.simulation.plans import Plan
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.datasets import Custom

LEASE_TTL_S = 5.0
MAX_TASK_FAILURES = 1000  # slowness must not discard records here: every record is trained
TASK_FLOOR_S, TASK_CEILING_S = 4.0, 8.0
TRAINING = Custom("training", reader="tests.simulation.dataset:reader")
EVALUATION = Custom("evaluation", reader="tests.simulation.dataset:reader")


def spec_of(plan: Plan) -> JobSpec:
    job = plan.job
    return JobSpec(
        job="simulated",
        script="simulated.py",
        dataset=TRAINING,
        evaluation_dataset=EVALUATION if plan.evaluate else None,
        mode=job.mode,
        strategy=plan.strategy,
        dispatch=plan.dispatch,
        epochs=plan.first_epochs or job.epochs,
        global_batch_size=job.minibatch * job.lanes,
        seed=job.seed,
        trainers=plan.trainers,
        pservers=plan.pservers,
        min_members=plan.min_members,
        records_per_task=job.task_records,
        block_bytes=BLOCK_BYTES,
        slot_count=128,
        push_every=job.push_every,
        clip_grad_norm=job.clip_grad_norm,
        gradient_dtype=job.travels_as,
        parameter_dtype=job.parameters_travel_as,
        on_nonfinite="skip" if job.skips else "fail",
        pull_every=plan.pull_every,
        max_staleness=plan.max_staleness,
        storage=STORAGE,
        lease_ttl_s=LEASE_TTL_S,
        stragglers="on" if plan.stragglers else "off",
        task_timeout_floor_s=TASK_FLOOR_S,
        task_timeout_ceiling_s=TASK_CEILING_S,
        max_task_failures=MAX_TASK_FAILURES,
        checkpoint_every_steps=plan.checkpoint_every,
        keep_checkpoints=plan.keep_checkpoints,
        evaluate_every=plan.evaluate_every,
        keep_best=plan.keep_best,
        stop_early=plan.stop_early,
        schedule_per="epoch" if job.schedule == "epoch" else "step",
        plateau_metric="value" if job.schedule == "plateau" else None,
        checkpoint_every_seconds=plan.checkpoint_every_s,
        skip_after_seconds=plan.skip_after_s,
        checkpoint_kind="independent" if plan.independent else "coordinated",
        **({"lanes": job.lanes, "rebalance_s": plan.rebalance_s} if job.mode is Mode.SYNC else {}),
    )
