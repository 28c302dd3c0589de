"""Lion is that of its paper, under plain PyTorch too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trireme


def of_the_paper(theta, gradients, eta, beta1, beta2, weight_decay):
    """Chen et al. 2023, algorithm 2, in float64."""
    m = np.zeros_like(theta)
    for g in gradients:
        c = beta1 * m + (1 - beta1) * g
        theta = theta - eta * (np.sign(c) + weight_decay * theta)
        m = beta2 * m + (1 - beta2) * g
    return theta, m


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5)])
def test_it_is_the_papers_algorithm(betas, weight_decay):
    numbers = np.random.default_rng(0)
    start, gradients = numbers.standard_normal(501), numbers.standard_normal((20, 501))
    gradients[:, 0] = 0  # its sign is 0
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = trireme.optim.Lion([parameter], lr=0.01, betas=betas, weight_decay=weight_decay)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    theta, m = of_the_paper(start, gradients, 0.01, *betas, weight_decay)
    np.testing.assert_allclose(parameter.detach().numpy(), theta, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(optimizer.state[parameter]["exp_avg"].numpy(), m, rtol=1e-12, atol=1e-14)


def test_it_goes_on_from_its_state_dict_with_schedulers_and_groups():
    def made():
        torch.manual_seed(1)
        parts = [torch.nn.Parameter(torch.randn(7)) for _ in range(3)]
        optimizer = trireme.optim.Lion([{"params": parts[:1], "lr": 0.1}, {"params": parts[1:]}], lr=0.01)
        return parts, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(parts, optimizer, scheduler, steps):
        for step in steps:
            for number, part in enumerate(parts[:2]):  # the third has no gradient
                part.grad = torch.sin(torch.arange(7.0) + step * 3 + number)
            optimizer.step(lambda: 1.0)
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
