"""Where parameters and buffers lie in the flat vectors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer_agent.membership.lease import check_layout
from trainer_agent.model.flat import Vector, plan
from trireme_shared.protocol.errors import LayoutMismatch
from trireme_shared.protocol.records.layout import ALIGNMENT_BYTES


def test_parameters_are_views_that_start_on_64_bytes_and_do_not_overlap(build):
    compute = build()
    places = sorted(compute.plan.parameters, key=lambda place: (place.segment, place.first))
    assert all(
        one.first + one.elements <= other.first
        for one, other in pairwise(places)
        if one.segment == other.segment
    )
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in compute.model.parameters())
    before = [parameter.clone() for parameter in compute.model.parameters()]
    for block in range(len(compute.plan.blocks)):
        compute.staging(block)[:] = compute.current(block)
    compute.swap()
    assert all(torch.equal(a, b) for a, b in zip(before, compute.model.parameters(), strict=True))
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in compute.model.parameters())


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([64, 256, 1024]),
    st.booleans(),
)
def test_every_element_lies_in_exactly_the_blocks_that_its_place_names(shapes, block_bytes, two_groups):
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    if not sum(parameter.numel() for parameter in parameters):
        return
    groups = (
        [{"params": list(parameters)[::2]}, {"params": list(parameters)[1::2]}]
        if two_groups and len(shapes) > 1
        else list(parameters)
    )
    found = plan(parameters, torch.optim.SGD(groups, lr=0.1), block_bytes, 128)
    vector = Vector(found, torch.device("cpu"))
    for number, place in enumerate(found.parameters):
        vector.view(place).fill_(number + 1)
    for number, place in enumerate(found.parameters):
        touched = [
            block.number for block in found.blocks if (vector.blocks[block.number] == number + 1).any()
        ]
        assert touched == list(found.blocks_of(place))
        assert int((vector.segments[place.segment] == number + 1).sum()) == place.elements
        assert place.first * 4 % ALIGNMENT_BYTES == 0


def test_segments_follow_dtype_and_group_and_what_is_not_trained_stays_home(build):
    compute = build(
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.half = nn.Linear(5, 3).bfloat16()
                self.full = nn.Linear(5, 3)
                self.frozen = nn.Linear(3, 3).requires_grad_(False)
                self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
                self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
                self.register_buffer("mean", torch.zeros(3))

            def forward(self, x):
                self.seen += len(x)
                self.mean = 0.9 * self.mean + x.mean(0)[:3]
                return self.frozen(self.half(x.bfloat16()).float() + self.full(x))

        def model():
            return Net()
        """
    )
    kinds = [(s.kind, s.dtype, s.elements, s.group) for s in compute.layout.segments]
    assert kinds == [
        ("param", "bfloat16", 32 + 3, 0),
        ("param", "float32", 16 + 16 + 16 + 3, 0),
        ("buffer", "int64", 1, -1),
        ("buffer", "float32", 3, -1),
    ]


def test_the_digest_depends_on_names_shapes_and_dtypes(build):
    digests = {
        build(model=f"def model():\n    return {text}\n").layout.digest
        for text in (
            "nn.Sequential(nn.Linear(5, 3))",
            "nn.Sequential(nn.Linear(5, 3, bias=False))",
            "nn.Sequential(nn.Identity(), nn.Linear(5, 3))",
            "nn.Sequential(nn.Linear(5, 3).bfloat16())",
        )
    }
    assert len(digests) == 4
    assert build().layout.digest == build().layout.digest


CONVOLUTION = """
    def model():
        made = nn.Sequential(nn.Conv2d({channels}, 4, {size}), nn.BatchNorm2d(4))
        return made.to(memory_format=torch.{format})
"""


def test_the_digest_depends_on_the_order_in_memory(build):
    """A channels_last trainer would read a contiguous one's weights permuted."""

    def layout(size, form, channels=3):
        return build(model=CONVOLUTION.format(size=size, format=form, channels=channels)).layout

    contiguous, channels_last = layout(2, "contiguous_format"), layout(2, "channels_last")
    assert contiguous.segments == channels_last.segments
    with pytest.raises(LayoutMismatch, match="different names, shapes, dtypes or memory formats"):
        check_layout(channels_last, contiguous)
    check_layout(channels_last, layout(2, "channels_last"))
    check_layout(
        layout(1, "channels_last"), layout(1, "contiguous_format")
    )  # a kernel of 1 x 1 has one order in memory
