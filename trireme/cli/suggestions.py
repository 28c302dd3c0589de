"""What commands say to options that they do not have: the setting that is meant, or where the value belongs.

--lr 0.1                  the script's optimizer has it
--records-per-task 64     a setting without a flag of its own: --set records_per_task=64
--batch-size 64           another name: --global-batch-size
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class WithSuggestions(TyperCommand):
    """A command with settings as its options. An option of which nothing is known is refused by typer."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in own:
                _refuse(name, own, as_json="--json" in args)
        return super().parse_args(ctx, args)


def _refuse(option: str, own: set[str], *, as_json: bool) -> None:
    """Raises typer.Exit if something is known of it."""
    from trireme.settings import UsageError, advice_on  # noqa: PLC0415  loads pydantic

    if advice := advice_on(option, own):
        from trireme.cli.exit_codes import USAGE, report_error  # noqa: PLC0415

        report_error(UsageError(advice), as_json=as_json)
        raise typer.Exit(USAGE)
