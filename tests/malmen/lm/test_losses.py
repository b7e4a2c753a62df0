from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F
from torch.testing import assert_close

from malmen.lm.losses import kl, nll


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    reference, edited = 3 * torch.randn(2, 7, 11, dtype=torch.float64)
    return reference, edited.requires_grad_()


def test_kl_is_the_divergence_of_torch_distributions_in_value_and_gradient(
    logits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    reference, edited = logits
    found = kl(reference.log_softmax(-1), edited.log_softmax(-1))
    expected = kl_divergence(Categorical(logits=reference), Categorical(logits=edited)).sum()
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, edited), torch.autograd.grad(expected, edited))


def test_kl_of_a_model_with_itself_is_zero_with_no_gradient(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, edited = logits
    found = kl(edited.detach().log_softmax(-1), edited.log_softmax(-1))
    (grad,) = torch.autograd.grad(found, edited)
    assert float(found.detach()) == 0.0
    assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-15)


def test_nll_is_the_summed_cross_entropy_in_value_and_gradient(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, edited = logits
    targets = torch.tensor([0, 10, 3, 3, 7, 1, 9])
    found = nll(edited.log_softmax(-1), targets)
    expected = F.cross_entropy(edited, targets, reduction="sum")
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, edited), torch.autograd.grad(expected, edited))


def test_both_are_sums_over_tokens(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    reference, edited = (some.log_softmax(-1) for some in logits)
    targets = torch.tensor([0, 10, 3, 3, 7, 1, 9])
    assert_close(kl(reference, edited), kl(reference[:3], edited[:3]) + kl(reference[3:], edited[3:]))
    assert_close(nll(edited, targets), nll(edited[:3], targets[:3]) + nll(edited[3:], targets[3:]))
