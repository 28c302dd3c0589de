"""LARS and LAMB are those of their papers, under plain PyTorch too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trireme

SHAPE = (7, 5, 3, 3)


def lars_of_the_paper(w, gradients, lr, momentum, decay, trust):
    """You, Gitman, Ginsburg 2017, algorithm 1 with the coefficient of its equation 6, in float64."""
    v = np.zeros_like(w)
    for g in gradients:
        size, slope = np.linalg.norm(w), np.linalg.norm(g)
        rate = trust * size / (slope + decay * size) if size and slope else 1.0
        v = momentum * v + lr * rate * (g + decay * w)
        w = w - v
    return w


def lamb_of_the_paper(x, gradients, lr, beta1, beta2, eps, decay):
    """You et al. 2020, algorithm 2, with phi(z) = z, in float64."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        size, length = np.linalg.norm(x), np.linalg.norm(r + decay * x)
        x = x - lr * (size / length if size and length else 1.0) * (r + decay * x)
    return x


def stepped(make, start, gradients):
    """`start` after a step with each of `gradients`, in float64."""
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return parameter.detach().numpy()


def numbers(zero: str = ""):
    """Values and gradients. `zero`: what of both is 0."""
    random = np.random.default_rng(0)
    start, gradients = random.standard_normal(SHAPE), random.standard_normal((12, *SHAPE))
    if zero == "values":
        start[:] = 0
    if zero == "gradients":
        gradients[:] = 0
    return start, gradients


@pytest.mark.parametrize("zero", ["", "values", "gradients"])
@pytest.mark.parametrize(
    ("momentum", "decay", "trust"), [(0.9, 1e-2, 1e-3), (0.0, 0.0, 0.02), (0.5, 0.3, 1.0)]
)
def test_lars_is_the_papers_algorithm(zero, momentum, decay, trust):
    options = {"lr": 0.3, "momentum": momentum, "weight_decay": decay, "trust_coefficient": trust}
    found = stepped(lambda parameters: trireme.optim.LARS(parameters, **options), *numbers(zero))
    np.testing.assert_allclose(
        found, lars_of_the_paper(*numbers(zero), 0.3, momentum, decay, trust), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("zero", ["", "values", "gradients"])
@pytest.mark.parametrize(("betas", "eps", "decay"), [((0.9, 0.999), 1e-6, 1e-2), ((0.0, 0.5), 1e-3, 0.0)])
def test_lamb_is_the_papers_algorithm(zero, betas, eps, decay):
    options = {"lr": 0.02, "betas": betas, "eps": eps, "weight_decay": decay}
    found = stepped(lambda parameters: trireme.optim.LAMB(parameters, **options), *numbers(zero))
    np.testing.assert_allclose(
        found, lamb_of_the_paper(*numbers(zero), 0.02, *betas, eps, decay), rtol=1e-12, atol=1e-14
    )


def test_without_layerwise_lars_is_sgd_and_lamb_adamw():
    """With decay the momentum of SGD has no learning rate in it, which is the same as long as that does not
    change."""
    start, gradients = numbers()
    lars = stepped(
        lambda p: trireme.optim.LARS(p, lr=0.1, momentum=0.9, weight_decay=0.1, layerwise=False),
        start,
        gradients,
    )
    sgd = stepped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), start, gradients)
    np.testing.assert_allclose(lars, sgd, rtol=1e-12, atol=1e-14)
    lamb = stepped(
        lambda p: trireme.optim.LAMB(p, lr=0.1, weight_decay=0.1, layerwise=False), start, gradients
    )
    adamw = stepped(lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-6, weight_decay=0.1), start, gradients)
    np.testing.assert_allclose(lamb, adamw, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_norms_are_over_the_memory_of_a_parameter_in_any_format_of_it_and_of_its_gradient(name):
    """A collective job has the parameter as a flat vector."""

    def trained(values, form):
        parameter = torch.nn.Parameter(values)
        optimizer = getattr(trireme.optim, name)([parameter], lr=0.1, weight_decay=0.01)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = form(torch.randn(SHAPE, generator=generator))
            optimizer.step()
        return parameter.detach()

    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9)).to(
        memory_format=torch.channels_last
    )
    found = trained(start.clone(), lambda gradient: gradient)
    flat = trained(
        start.permute(0, 2, 3, 1).reshape(-1).clone(),
        lambda gradient: gradient.permute(0, 2, 3, 1).reshape(-1),
    )
    assert torch.equal(found.permute(0, 2, 3, 1).reshape(-1), flat)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_they_go_on_from_their_state_dict_with_groups_and_schedulers(name):
    def made():
        torch.manual_seed(1)
        parts = [torch.nn.Parameter(torch.randn(7)) for _ in range(3)]
        groups = [{"params": parts[:1], "layerwise": False}, {"params": parts[1:]}]
        optimizer = getattr(trireme.optim, name)(groups, lr=0.1)
        return parts, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(parts, optimizer, scheduler, steps):
        for step in steps:
            for number, part in enumerate(parts[:2]):  # the third has no gradient
                part.grad = torch.sin(torch.arange(7.0) + step * 3 + number)
            assert optimizer.step(lambda: 1.0) == 1.0
            scheduler.step()

    whole, half = made(), made()
    train(*whole, range(6))
    train(*half, range(3))
    again = made()
    for part, other in zip(again[0], half[0], strict=True):
        part.data.copy_(other.data)
    for mine, other in zip(again[1:], half[1:], strict=True):
        mine.load_state_dict(other.state_dict())
    train(*again, range(3, 6))
    assert all(map(torch.equal, whole[0], again[0]))
    assert torch.equal(whole[0][2], made()[0][2])
    assert not torch.equal(whole[0][1], made()[0][1])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LARS", {"lr": -1.0}, "LARS: lr is -1.0; expected a number that is not negative"),
        ("LARS", {"momentum": 1.0}, r"LARS: momentum is 1.0; expected a number in \[0, 1\)"),
        ("LARS", {"trust_coefficient": float("nan")}, "LARS: trust_coefficient is nan"),
        ("LAMB", {"eps": -1e-6}, "LAMB: eps is -1e-06"),
        ("LAMB", {"betas": (0.9, 1.5)}, r"LAMB: betas are \(0.9, 1.5\); expected two numbers"),
        ("LAMB", {"betas": (0.9,)}, r"LAMB: betas are \(0.9,\); expected two numbers"),
    ],
)
def test_options_that_cannot_be_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(trireme.optim, name)([torch.nn.Parameter(torch.zeros(1))], **options)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_sparse_gradients_are_refused(name):
    table = torch.nn.Embedding(9, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        RuntimeError, match="LARS and LAMB take dense gradients; make the layer without sparse=True"
    ):
        getattr(trireme.optim, name)(table.parameters()).step()
