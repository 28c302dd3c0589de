"""`trireme run` takes names that other systems' command lines have (ElasticDL, PaddlePaddle) where they mean
the same. docs/migration.md has them all.

--num_workers 4     means the same  -> --trainers 4, and a line on stderr that names it
--grads_to_wait 2   does not        -> an error that says what to use
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from trireme.cli.suggestions import WithSuggestions

PAGE = "docs/migration.md"
ELASTICDL, LAUNCH, PADDLE_TRAIN = "ElasticDL", "paddle.distributed.launch", "paddle train"
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
_OFF = tuple(f"checkpoint_every_{unit}=off" for unit in ("steps", "epochs", "seconds"))
_SCRIPT = "the script defines it, and is the argument of trireme run"
_PODS = (
    "there are no pods: trireme run starts processes on this machine, trireme up and trireme submit on "
    "several"
)
_RESTARTS = (
    "use --restart-policy and --restart-delay-s; a task that fails is tried again as --set "
    "max_task_failures says"
)
_HOSTS = (
    "trireme run is one machine, and members find each other by etcd; for several use trireme up and "
    "trireme submit"
)
_LOGS = "logs are in .trireme/<job>/logs, and trireme logs shows them"
_OF_ELASTICDL = {
    "--minibatch_size": "it is of one worker; --global-batch-size is of a whole step, minibatch times lanes "
    "(default 8), and in asynchronous jobs of one minibatch",
    "--num_minibatches_per_task": "use --set records_per_task=N with N = minibatches times records of one",
    "--training_data": "dataset() in the script says where the records are",
    "--validation_data": "evaluation_dataset() in the script says where the records are",
    "--prediction_data": "there is no prediction job: export the model and use it in plain PyTorch",
    "--prediction_outputs_processor": (
        "there is no prediction job: export the model and use it in plain PyTorch"
    ),
    "--grads_to_wait": "in a synchronous job every step waits for all lanes (--lanes); in an asynchronous "
    "one each trainer pushes the mean of --push-every minibatches",
    "--sync_version_tolerance": "all gradients of a synchronous step are of one version: leave it out",
    "--checkpoint_dir": "use --storage, below which checkpoints and exports of each job have a folder",
    "--checkpoint_dir_for_init": "use --init-from FILE|JOB[@STEP]",
    "--output": "use --storage; the model is in its export folder, and trireme export writes it elsewhere",
    "--max_step": "a job ends after --epochs, or by --set stop_early=METRIC",
    "--log_loss_steps": "the loss of each step is stored: trireme metrics",
    "--model_zoo": _SCRIPT,
    "--model_def": _SCRIPT,
    "--feed": "collate(records) in the script makes minibatches",
    "--loss": "loss(model, batch) in the script has this name",
    "--optimizer": "optimizer(model) in the script has this name",
    "--callbacks": "scheduler(optimizer), evaluate and metrics in the script, --set stop_early, keep_best "
    "and --tracker do what callbacks did",
    "--eval_metrics_fn": "metrics(sums) in the script has this name",
    "--custom_data_reader": "dataset() in the script returns a reader",
    "--data_reader_params": "dataset() in the script has them as arguments",
    "--relaunch_on_worker_failure": _RESTARTS,
    "--relaunch_timeout_worker": (
        "stragglers are helped, and a silent trainer is replaced after --set lease_ttl_s"
    ),
    "--task_fault_tolerance": "tasks always are fault tolerant: leave it out",
    "--log_level": _LOGS,
    "--log_file_path": _LOGS,
    "--envs": "set them in the environment of trireme run: all processes have them",
    "--aux_params": "there are none: leave it out",
    "--job_command": _SCRIPT,
    "--job_type": "trireme run trains and evaluates; there is no other type of job",
    **dict.fromkeys(
        [
            "--image_name",
            "--worker_image",
            "--base_image",
            "--extra_pypi_index",
            "--image_pull_policy",
            "--master_resource_request",
            "--master_resource_limit",
            "--worker_resource_request",
            "--worker_resource_limit",
            "--ps_resource_request",
            "--ps_resource_limit",
            "--master_pod_priority",
            "--worker_pod_priority",
            "--ps_pod_priority",
            "--volume",
            "--namespace",
            "--cluster_spec",
            "--cluster_spec_json",
            "--yaml",
            "--force_use_kube_config_file",
            "--populate_env_names",
            "--need_elasticdl_job_service",
            "--need_task_manager",
            "--need_pod_manager",
            "--need_tf_config",
        ],
        _PODS,
    ),
}
_OF_LAUNCH = {
    "--nnodes": f"{_HOSTS}; --min-members is the smaller number of a range",
    "--master": "use --etcd URL for an etcd that is there; without it trireme run starts one",
    "--elastic_server": "use --etcd URL",
    "--np": "use --trainers, and --min-members for the smaller number of a range",
    "--devices": "use --device cuda; CUDA_VISIBLE_DEVICES chooses GPUs",
    "--gpus": "use --device cuda; CUDA_VISIBLE_DEVICES chooses GPUs",
    "--max_restart": _RESTARTS,
    "--elastic_level": "jobs always are elastic: leave it out; --restart-policy says who is started again",
    "--elastic_timeout": "the job begins with --min-members trainers; --set join_window_s says how long "
    "others are waited for then",
    "--log_dir": _LOGS,
    "--heter_workers": "there are no trainers of two kinds",
    "--heter_worker_num": "there are no trainers of two kinds",
    **dict.fromkeys(
        [
            "--servers",
            "--workers",
            "--ips",
            "--rank",
            "--start_port",
            "--http_port",
            "--gloo_port",
            "--with_gloo",
            "--sort_ip",
            "--scale",
            "--force",
        ],
        _HOSTS,
    ),
    **dict.fromkeys(
        [
            "--auto_parallel_config",
            "--auto_cluster_config",
            "--auto_tuner_json",
            "--legacy",
            "--log_overwrite",
            "--enable_gpu_log",
        ],
        "it has no counterpart: leave it out",
    ),
}
_OF_PADDLE_TRAIN = {
    "--config": _SCRIPT,
    "--trainer_count": "it is threads of one trainer: use --set threads_per_trainer=N; the number of "
    "trainers is --trainers",
    "--save_dir": "use --storage, below which checkpoints and exports of each job have a folder",
    "--init_model_path": "use --init-from FILE|JOB[@STEP]",
    "--start_pass": "the same command resumes a job where it was: leave it out",
    "--use_gpu": "use --device cuda or --device cpu",
    "--local": "one process without a cluster is `python SCRIPT`, without trireme run",
    "--log_period": "the loss of each step is stored: trireme metrics",
    "--test_period": "use --set evaluate_every=N, in steps",
    **dict.fromkeys(
        ["--ports_num", "--ports_num_for_sparse", "--trainer_id", "--nics", "--start_pserver"], _HOSTS
    ),
}


class OtherNameError(Exception):
    """A name of another system that has no counterpart, or with a value that has none."""


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with our names, and a line about each name that was another system's. Raises
    OtherNameError."""
    given = list(arguments)
    notes: list[str] = []
    found: list[str] = []
    while given:
        word = given.pop(0)
        if word == "--":
            return [*found, word, *given], notes
        name, equals, value = word.partition("=")
        if name in REFUSED:
            refused = REFUSED[name]
            msg = f"{name} is an option of {refused.system}: {refused.instead} ({PAGE})"
            raise OtherNameError(msg)
        if name not in ACCEPTED:
            found.append(word)
            continue
        accepted = ACCEPTED[name]
        if not equals:
            value = _next_value(name, accepted, given)
        try:
            ours = accepted.ours(value)
        except Unfit as error:
            msg = f"{name} {value} is an option of {accepted.system}: {error} ({PAGE})"
            raise OtherNameError(msg) from error
        _check_once(name, ours, [*arguments, *found])
        found += ours
        notes.append(f"{name} is an option of {accepted.system}; ours is {' '.join(ours)} ({PAGE})")
    return found, notes


def _next_value(name: str, accepted: Accepted, given: list[str]) -> str:
    """Taken from `given`."""
    if given and (not accepted.alone or given[0].lower() in (*TRUE, *FALSE)):
        return given.pop(0)
    if accepted.alone:
        return accepted.alone
    msg = f"{name} needs a value ({PAGE})"
    raise OtherNameError(msg)


def _check_once(name: str, ours: Sequence[str], arguments: Sequence[str]) -> None:
    """Raises OtherNameError: our name is there as well, as a flag or in --set."""
    setting = (
        ours[1].partition("=")[0] if ours[0] == "--set" else ours[0].removeprefix("--").replace("-", "_")
    )
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, attached = argument.partition("=")
        assigned = (attached if equals else following).partition("=")[0].strip()
        if flag == ours[0] != "--set" or (flag == "--set" and assigned == setting):
            msg = f"{name} is {' '.join(ours)} here, which is given as well: leave out one of both ({PAGE})"
            raise OtherNameError(msg)


class WithOtherNames(WithSuggestions):
    """A command that takes them, and does not show them in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            args, notes = translated(args)
        except OtherNameError as error:
            from trireme.cli.exit_codes import USAGE, report_error  # noqa: PLC0415
            from trireme_shared.protocol.errors import InvalidArgument  # noqa: PLC0415

            report_error(InvalidArgument(str(error)), as_json="--json" in args)
            raise typer.Exit(USAGE) from error
        for note in notes:
            print(note, file=sys.stderr)  # noqa: T201
        return super().parse_args(ctx, args)


class Unfit(Exception):
    """The value means something else here; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """`ours(value)`: the same as arguments of `trireme run`. `alone`: what the name means without a value;
    "": it needs one."""

    system: str
    ours: Callable[[str], list[str]]
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """`instead`: why, and what to use."""

    system: str
    instead: str


def _flag(name: str) -> Callable[[str], list[str]]:
    return lambda value: [name, value]


def _set(name: str) -> Callable[[str], list[str]]:
    return lambda value: ["--set", f"{name}={value}"]


def _one_of(name: str, **values: str) -> Callable[[str], list[str]]:
    """`values`: theirs -> ours; what begins with "!" says why there is none."""

    def ours(value: str) -> list[str]:
        found = values.get(value, f"!expected one of {', '.join(values)}")
        if found.startswith("!"):
            raise Unfit(found[1:])
        return [name, found]

    return ours


def _truth(value: str) -> bool:
    if value.lower() not in (*TRUE, *FALSE):
        raise Unfit("expected true or false")
    return value.lower() in TRUE


def _checkpoint_steps(value: str) -> list[str]:
    if value == "0":  # none at all
        return [word for assignment in _OFF for word in ("--set", assignment)]
    return ["--set", f"checkpoint_every_steps={value}"]


def _keep_checkpoints(value: str) -> list[str]:
    if value == "0":
        raise Unfit("0 keeps all there; here keep_checkpoints is 1 to 100: use --set keep_checkpoints=100")
    return ["--set", f"keep_checkpoints={value}"]


ACCEPTED: dict[str, Accepted] = {
    "--num_workers": Accepted(ELASTICDL, _flag("--trainers")),
    "--num_ps_pods": Accepted(ELASTICDL, _flag("--pservers")),
    "--num_epochs": Accepted(ELASTICDL, _flag("--epochs")),
    "--job_name": Accepted(ELASTICDL, _flag("--job")),
    "--get_model_steps": Accepted(ELASTICDL, _flag("--pull-every")),
    "--evaluation_steps": Accepted(ELASTICDL, _set("evaluate_every")),
    "--checkpoint_steps": Accepted(ELASTICDL, _checkpoint_steps),
    "--keep_checkpoint_max": Accepted(ELASTICDL, _keep_checkpoints),
    "--use_async": Accepted(
        ELASTICDL, lambda value: ["--mode", "async" if _truth(value) else "sync"], alone="true"
    ),
    "--lr_staleness_modulation": Accepted(
        ELASTICDL,
        lambda value: ["--set", f"lr_staleness_modulation={str(_truth(value)).lower()}"],
        alone="true",
    ),
    "--distribution_strategy": Accepted(
        ELASTICDL,
        _one_of(
            "--strategy",
            ParameterServerStrategy="parameter_server",
            AllreduceStrategy="collective",
            Local="!one process without a cluster is `python SCRIPT`, without trireme run",
        ),
    ),
    "--restart_policy": Accepted(
        ELASTICDL, _one_of("--restart-policy", Never="never", OnFailure="on_failure", Always="always")
    ),
    "--trainer_num": Accepted(LAUNCH, _flag("--trainers")),
    "--worker_num": Accepted(LAUNCH, _flag("--trainers")),
    "--nproc_per_node": Accepted(LAUNCH, _flag("--trainers")),
    "--server_num": Accepted(LAUNCH, _flag("--pservers")),
    "--job_id": Accepted(LAUNCH, _flag("--job")),
    "--run_mode": Accepted(
        LAUNCH,
        _one_of(
            "--strategy",
            collective="collective",
            ps="parameter_server",
            **{"ps-heter": "!there are no trainers of two kinds; use --strategy parameter_server"},
        ),
    ),
    "--num_passes": Accepted(PADDLE_TRAIN, _flag("--epochs")),
    "--num_gradient_servers": Accepted(PADDLE_TRAIN, _flag("--trainers")),
    "--saving_period": Accepted(PADDLE_TRAIN, _set("checkpoint_every_epochs")),
    "--saving_period_by_batches": Accepted(PADDLE_TRAIN, _set("checkpoint_every_steps")),
}


REFUSED: dict[str, Refused] = {
    name: Refused(system, instead)
    for system, names in ((ELASTICDL, _OF_ELASTICDL), (LAUNCH, _OF_LAUNCH), (PADDLE_TRAIN, _OF_PADDLE_TRAIN))
    for name, instead in names.items()
}
