"""The command lines of other processes, which may end at any instant."""

import psutil


def command_line(process: psutil.Process) -> str:
    """As `ps` shows it; empty if it has ended (also while nobody has read its exit status yet)."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
