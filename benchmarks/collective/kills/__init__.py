"""What the others lose by one of four trainers that is killed or frozen, and whether they ever disagree about
a step."""

from benchmarks.collective.kills.report import Counts, report

__all__ = ["Counts", "report"]
