"""Parameters that share memory with another tensor of the model are refused: in the flat vector each has its
own."""

from __future__ import annotations

import pytest

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.script.user_module import load
from trireme import plain
from trireme_shared.protocol.errors import InvalidArgument

MODEL = """
def model():
    made = nn.Module()
    made.a, made.b, made.norm = nn.Linear(5, 3), nn.Linear(5, 3), nn.BatchNorm1d(3)
    made.forward = lambda x: made.norm(made.a(x) + made.b(x))
    TIE
    return made
"""
OPTIMIZER = "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"
REFUSED = {
    "made.b.weight.data = made.a.weight.data": (
        "the parameter a.weight shares memory with the parameter b.weight"
    ),
    "made.b.weight.data = made.a.weight.data; made.b.weight.requires_grad = False": (
        "the parameter a.weight shares memory with the parameter b.weight"
    ),
    "whole = torch.randn(20); made.a.weight.data = whole[:15].view(3, 5); made.b.weight.data = "
    "whole[5:].view(3, 5)": "the parameter a.weight shares memory with the parameter b.weight",
    "made.b.bias.data = made.a.weight.data[:, 0]": (
        "the parameter a.weight shares memory with the parameter b.bias"
    ),
    "made.register_buffer('mean', made.a.weight.detach())": (
        "the parameter a.weight shares memory with the buffer mean"
    ),
    "made.a.turned = made.a.weight.data.t()": (
        "the parameter a.weight shares memory with the attribute a.turned"
    ),
    "made.kept = [p.data for p in made.b.parameters()]": (
        "the parameter b.weight shares memory with the attribute kept"
    ),
    "made.a.bias = nn.Parameter(torch.zeros(1).expand(3))": (
        r"elements of the parameter a.bias share memory \(shape \(3,\), strides \(0,\)\)"
    ),
    "made.a.weight.data = torch.randn(7).as_strided((3, 5), (1, 1))": (
        "elements of the parameter a.weight share memory"
    ),
}


@pytest.mark.parametrize("tie", list(REFUSED))
def test_what_shares_memory_is_refused_with_both_names(build, tmp_path, tie):
    parts = {"model": MODEL.replace("TIE", tie), "optimizer": OPTIMIZER}
    with pytest.raises(InvalidArgument, match=REFUSED[tie]) as caught:
        build(**parts)
    assert caught.value.hint
    script = write_script(tmp_path, "alone", **parts)
    with pytest.raises(InvalidArgument, match=REFUSED[tie]):
        plain.run(load(script), spec_for(script))


@pytest.mark.parametrize(
    "tie",
    [
        "made.b.weight = made.a.weight",
        (
            "whole = torch.randn(30); made.a.weight.data = whole[:15].view(3, 5); made.b.weight.data = "
            "whole[15:].view(3, 5)"
        ),
        "whole = torch.randn(3, 10); made.a.weight.data = whole[:, :5]; made.b.weight.data = whole[:, 5:]",
        "made.a.weight.data = torch.randn(5, 3).t()",
        "made.kept = [made.a.weight]",
        "made.register_buffer('mean', made.a.weight.detach().clone())",
        "nn.utils.spectral_norm(made.a); nn.utils.weight_norm(made.b)",
        "made.rnn = nn.LSTM(5, 5)",
    ],
)
@pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm")
def test_what_has_memory_of_its_own_or_is_one_parameter_is_laid_out(build, tie):
    build(model=MODEL.replace("TIE", tie), optimizer=OPTIMIZER)
