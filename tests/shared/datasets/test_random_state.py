"""A script's code draws what its seed says, and leaves the generators of everybody else as they were."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from trireme_shared.datasets.random_state import (
    START_SEED,
    Generators,
    seed_everything,
    seed_of,
    seeded,
    undisturbed,
)

DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "numpy.random": lambda: np.random.random(),  # noqa: NPY002  user code uses the global generator
    "random": random.random,
}


def draws() -> list[float]:
    return [draw() for draw in DRAWS.values()]


def test_what_is_drawn_depends_on_the_seed_alone_and_disturbs_nobody() -> None:
    seed_everything(1)
    first, second = draws(), draws()
    seed_everything(1)
    with seeded(7):
        inside = draws()
    assert draws() == first
    with seeded(7), seeded(8):
        assert draws() != inside
    with seeded(7):
        assert draws() == inside
    assert draws() == second


def test_the_seed_of_an_import_is_that_of_a_process_that_has_drawn_nothing() -> None:
    assert torch.Generator().initial_seed() == START_SEED


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_has_moved_is_named(name: str) -> None:
    with undisturbed():
        before = Generators.now()
        assert before.differs() == ""
        DRAWS[name]()
        assert before.differs() == name
        before.restore()
        assert before.differs() == ""


def test_a_normal_number_that_numpy_keeps_for_later_counts_as_state() -> None:
    with undisturbed():
        np.random.normal()  # noqa: NPY002
        before = Generators.now()
        np.random.normal()  # noqa: NPY002  takes the one that is kept
        assert before.differs() == "numpy.random"


def test_others_wait_while_a_script_draws() -> None:
    order: list[str] = []

    def other() -> None:
        with seeded(2):
            order.append("other")

    with seeded(1):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_seeds_differ_by_each_of_their_names() -> None:
    names = [(), ("a",), ("b",), (0,), (1,), ("a", 0), ("a", 1), ("b", 1)]
    assert len({seed_of(3, *each) for each in names}) == len(names)
