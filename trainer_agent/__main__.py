"""`python -m trainer_agent`: one trainer, configured by TRIREME_* variables; `... inspect SCRIPT`: what a
script says.

exit 0: the job is complete, or asked to stop; 1: it failed; 75: the lease was lost, start me again; 2:
configuration
"""

from __future__ import annotations

import argparse
import sys

from trireme_shared.platform.runtime.process_setup import fix_hash_seed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_agent", description="One trainer of a Trireme job."
    )
    parser.epilog = (
        "Settings come from the environment: TRIREME_JOB (required), TRIREME_ETCD, TRIREME_TOKEN, "
        "TRIREME_HOST, TRIREME_PORT, "
        "TRIREME_ADVERTISE, TRIREME_NAME, TRIREME_LOG_LEVEL; in collective jobs "
        "TRIREME_EXCHANGE_PORT, TRIREME_UDS."
    )
    commands = parser.add_subparsers(dest="command")
    inspect = commands.add_parser("inspect", help="check a script and print its config and datasets as JSON")
    inspect.add_argument("script")
    inspect.add_argument(
        "--no-check", action="store_true", help="only import it; do not build its model or read records"
    )
    inspect.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting over its config"
    )
    arguments = parser.parse_args()
    if arguments.command == "inspect":
        # --help answers without loading torch
        from trainer_agent.script.inspect import inspect_script  # noqa: PLC0415

        return inspect_script(arguments.script, check=not arguments.no_check, settings=arguments.set)
    return _train()


def _train() -> int:
    from trainer_agent.settings import Settings  # noqa: PLC0415

    settings = Settings.from_environment()
    from trainer_agent.process import serve  # noqa: PLC0415

    # torch is loaded only for settings that make sense
    from trireme_shared.platform.runtime import service, telemetry  # noqa: PLC0415

    telemetry.configure(level=settings.log_level, service="trainer", job=settings.job)
    settings.look_up_own_name()
    return service.run(lambda stopping: serve(settings, stopping))


if __name__ == "__main__":
    fix_hash_seed()
    sys.exit(main())
