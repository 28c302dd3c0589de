"""The options that several commands share, as typer takes them."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

# the groups of commands in `trireme --help`
START, WATCH, CLUSTER, REPAIR = "Start a job", "Watch it", "Run a cluster", "Repair"

Form = Literal["table", "csv", "json", "plot"]  # of `metrics`


def of_job(name: str) -> str:
    """A job that was started as `my_model` is called `my-model`: commands take both."""
    return name.replace("_", "-")


Job = Annotated[
    str | None,
    typer.Option(
        "--job", help="Name of the job. Default: the one started last.", metavar="NAME", parser=of_job
    ),
]
Named = Annotated[
    str | None,
    typer.Argument(help="Name of the job. Default: the one started last.", metavar="[JOB]", parser=of_job),
]
JobName = Annotated[str, typer.Argument(help="Name of the job.", metavar="JOB", parser=of_job)]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of all local runs. Default: .trireme", metavar="DIR")
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of the job's master or of a cluster. Default: what runs locally.",
        metavar="URL",
    ),
]
Tables = Annotated[  # of `export`
    Literal["safetensors", "npy", "parquet", "none"],
    typer.Option("--tables", help="How the rows of embedding tables are written, to tables/ in the folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
WaitS = Annotated[
    float, typer.Option("--wait-s", help="Seconds to wait for the end; 0: do not wait.", min=0, metavar="S")
]

# of `run` and `up`
Etcd = Annotated[
    str | None,
    typer.Option(
        "--etcd",
        help="Use this etcd (cluster) instead of starting one; several addresses with commas.",
        metavar="URL[,URL]",
    ),
]
EtcdUser = Annotated[
    str | None,
    typer.Option(
        "--etcd-user",
        help="User of that etcd; the password comes from TRIREME_ETCD_PASSWORD.",
        metavar="NAME",
    ),
]
EtcdPasswordFile = Annotated[
    str | None,
    typer.Option(
        "--etcd-password-file", help="File whose first line is that user's password.", metavar="FILE"
    ),
]
EtcdCa = Annotated[
    str | None,
    typer.Option(
        "--etcd-ca", help="PEM file of the authority that signed etcd's certificate.", metavar="FILE"
    ),
]
EtcdCert = Annotated[
    str | None,
    typer.Option("--etcd-cert", help="PEM file of the client's certificate for etcd.", metavar="FILE"),
]
EtcdKey = Annotated[
    str | None, typer.Option("--etcd-key", help="PEM file of the key of that certificate.", metavar="FILE")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        help="Name or address by which other hosts reach this one. Default: --host.",
        metavar="HOST",
    ),
]

Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Ask nobody for a token. Members then listen on loopback addresses only."
    ),
]

# of `run` and `submit`
Script = Annotated[
    Path, typer.Argument(help="A Python file that defines model, dataset, loss and optimizer.")
]
Mode = Annotated[str | None, typer.Option(help="sync (deterministic) or async.", metavar="sync|async")]
Strategy = Annotated[
    str | None,
    typer.Option(
        help="Where parameters are stepped: on parameter servers, or by every trainer, without "
        "parameter servers.",
        metavar="parameter_server|collective",
    ),
]
MinMembers = Annotated[
    int | None,
    typer.Option(
        help="Collective: train only while so many trainers have the parameters. Default: 1.", metavar="N"
    ),
]
OF_EXCHANGE = ("exchange", "backend", "reduction", "bucket_bytes")
ExchangeOfJob = Annotated[
    str | None,
    typer.Option(
        "--exchange",
        help="Collective: trainers send each other gradients themselves, or by groups of "
        "torch.distributed. Default: direct.",
        metavar="direct|native",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(help="Native exchange: auto is NCCL on GPUs, else Gloo.", metavar="auto|gloo|nccl"),
]
Reduction = Annotated[
    str | None,
    typer.Option(
        help="Native exchange: the same bits whoever trains (canonical, the default), or those of an "
        "allreduce.",
        metavar="canonical|fast",
    ),
]
BucketBytes = Annotated[
    int | None,
    typer.Option(
        "--bucket-bytes",
        help="Native exchange: bytes of gradients in one operation. Default: 26214400.",
        metavar="N",
    ),
]
Restarts = Annotated[
    str | None,
    typer.Option(
        "--restart-policy",
        help="Whether a dead trainer or parameter server is started again. Default: always.",
        metavar="always|on_failure|never",
    ),
]
RestartDelayS = Annotated[
    float | None,
    typer.Option("--restart-delay-s", help="Seconds until it is, at least. Default: 0.", metavar="S"),
]
Pservers = Annotated[
    str | None,
    typer.Option(
        help="Number of parameter servers. auto, the default: one for each 32 MiB of parameters, at "
        "most half of the cores.",
        metavar="N|auto",
    ),
]
Lanes = Annotated[int | None, typer.Option(help="Virtual workers of sync mode; a power of two.", metavar="N")]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init-from",
        help="Start with the parameters in this file (safetensors or state_dict), or with those of "
        "another job.",
        metavar="FILE|URL|JOB[@STEP]",
    ),
]
InitPartial = Annotated[
    bool | None,
    typer.Option("--init-partial", help="Leave out what does not fit the model.", show_default=False),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        help="Metrics also go there: csv, tensorboard, mlflow, wandb "
        "(mlflow?experiment=NAME&run=NAME&uri=URL), or pkg.mod:Name. May be repeated.",
        metavar="TRACKER",
    ),
]
InitOptimizer = Annotated[
    bool | None,
    typer.Option(
        "--init-optimizer",
        help="With --init-from: take the state of the optimizer and the scheduler along.",
        show_default=False,
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the dataset.", metavar="N")]
GlobalBatchSize = Annotated[
    int | None, typer.Option(help="Records of one step; in sync mode over all lanes.", metavar="N")
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the order of records and of all random numbers.", metavar="N")
]
PushEvery = Annotated[int | None, typer.Option(help="Async: minibatches per push.", metavar="N")]
PullEvery = Annotated[int | None, typer.Option(help="Async: minibatches per pull.", metavar="N")]
StalenessRate = Annotated[
    bool | None,
    typer.Option(
        "--lr-staleness-modulation",
        help="Async: divide the learning rate of a push by the versions since its pull.",
        show_default=False,
    ),
]
MaxStaleness = Annotated[
    int | None,
    typer.Option(
        help="Async: wait before a minibatch while a trainer computes with parameters more than N "
        "versions older.",
        metavar="N",
    ),
]
Device = Annotated[str | None, typer.Option(help="Where trainers compute.", metavar="auto|cpu|cuda")]
GradientDtype = Annotated[
    str | None, typer.Option(help="Dtype in which gradients are sent.", metavar="float32|bfloat16|float16")
]
ParameterDtype = Annotated[
    str | None, typer.Option(help="Dtype in which parameters are pulled.", metavar="float32|bfloat16|float16")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any other setting of trireme.Config.", metavar="NAME=VALUE")
]
Check = Annotated[bool, typer.Option(help="Try one minibatch before anything is started.")]


def say_checking(script: Path) -> None:
    """Said before the imports, which take a second. What is wrong with the path is said after them."""
    with suppress(PermissionError):
        if script.is_file():
            print(f"checking {script}", file=sys.stderr)  # noqa: T201
