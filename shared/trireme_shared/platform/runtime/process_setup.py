"""How a process is set up before it works: what ends it, how it hashes text, how it gets memory, and what it
does not load.

The launcher gives the environment (`hash_seed`, `memory_tunables`) and starts children with
`die_with_parent`; the process calls the others itself. This module is loaded before anything else, so it
loads nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_adopters = 0


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel kill the child when its parent dies, even by SIGKILL; None on
    other systems.

    Linux kills the child when the *thread* that started it ends: start children from the main thread.
    """
    if sys.platform != "linux":
        return None
    _libc()  # load it now, not between fork and exec
    return partial(die_with, os.getpid())


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies. Exits at once if `parent` is not its
    parent (any more)."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hear_of_the_end_of(parent: int, number: signal.Signals) -> None:
    """From now on this process gets that signal when its parent dies, instead of being killed; at once if it
    is dead already. Linux."""
    if sys.platform != "linux":
        return
    _libc().prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextmanager
def adopting() -> Iterator[None]:
    """Descendants that lose their parent inside the block become children of this process instead of init."""
    global _adopters  # noqa: PLW0603  a property of the process
    _adopters += 1
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _adopters -= 1
        if not _adopters:
            _libc().prctl(_PR_SET_CHILD_SUBREAPER, 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


VARIABLE = "GLIBC_TUNABLES"  # read at the start of a process, so its parent has to set it
HUGE_PAGES = "glibc.malloc.hugetlb"
TUNABLES = f"{HUGE_PAGES}=1"
MAPPED_BYTES = 8 << 20
KEPT_BYTES = 64 << 20  # kept at the end of a heap, where small allocations come and go in every step

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)


def memory_tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a process that is started in this environment gets memory cheaply; the user's own
    setting for huge pages wins. It works with glibc 2.35 or later.

    A backward pass allocates and frees as much as the gradients take, in every step. glibc serves sizes up to
    32 MiB from heaps, one for each thread, and keeps most of the freed memory: a trainer with 40 MB of
    parameters held 60 to 90 MB unused.

        from 8 MiB    each allocation has its own mapping, returned when it is freed (`give_memory_back`)
        mappings      use huge pages: one page fault for 2 MiB instead of 512, so a new mapping is cheap
                      (`TUNABLES`)
    """
    given = environment.get(VARIABLE, "")
    if HUGE_PAGES in given:
        return {VARIABLE: given}
    return {VARIABLE: f"{given}:{TUNABLES}" if given else TUNABLES}


def give_memory_back() -> bool:
    """From now on large allocations go back to the system when they are freed. False: nothing has changed,
    because without huge pages new mappings cost more than they save (a sixth of the training speed of a
    perceptron with 10M parameters)."""
    if TUNABLES not in os.environ.get(VARIABLE, "").split(":") or not has_huge_pages():
        return False
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        return bool(
            libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        )
    return False


def has_huge_pages() -> bool:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        known = name == "glibc" and tuple(map(int, version.split("."))) >= _SINCE
        return known and "[never]" not in _SYSTEM.read_text()
    except (OSError, ValueError):
        return False


_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_ATTRIBUTE = "__dynamo_disable"  # where torch._compile._disable_dynamo keeps it


def optimizers_without_compiler() -> None:
    """Keeps torch.optim from loading torch's compiler, which takes 1.7 s and 100 MB. Call it before the first
    optimizer is made.

    Methods of Optimizer that must not be compiled import torch._dynamo at their first call, to exclude
    themselves. torch keeps the result in an attribute of the function. With the function itself in that
    attribute, torch does not import torch._dynamo. A process that does compile something loads it then.
    """
    from torch.optim import Optimizer  # noqa: PLC0415  most processes do without torch

    for name in _METHODS:
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _ATTRIBUTE):
            setattr(method, _ATTRIBUTE, method)


HASH_SEED = "PYTHONHASHSEED"
DEFAULT_HASH_SEED = "0"


def hash_seed(environment: Mapping[str, str]) -> str:
    """The PYTHONHASHSEED of a member that is started with `environment`: the user's own number, else
    DEFAULT_HASH_SEED. So all members hash text alike, and a set of names has the same order in each of them.

    Python chooses another hash seed for each process unless PYTHONHASHSEED is set. A model whose modules come
    from a set, or a dataset whose files do, would then differ between trainers, and from the job's own
    checkpoints when it is resumed.
    """
    own = environment.get(HASH_SEED, "")
    return own if own.isdecimal() else DEFAULT_HASH_SEED  # "random" would be another number in each member


def fix_hash_seed() -> None:
    """Start this program again with a fixed hash seed, unless it has one: the seed cannot be changed once
    Python runs. For members that no launcher has started. Call it before anything else."""
    if not os.environ.get(HASH_SEED, "").isdecimal():
        os.environ[HASH_SEED] = DEFAULT_HASH_SEED
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  the same program
