"""The two ways to multiply float32 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from malmen.config import ModelConfig
from malmen.lm.products import onednn_gain, use_float32_products

pytestmark = pytest.mark.skipif(onednn_gain() == 0, reason="this torch has no oneDNN")
Sizes = tuple[int, int, int]
LARGE = (50, 3000, 40)  # enough for oneDNN; the inner size is summed in parts, which tell the two apart


def matrices(dtype: torch.dtype = torch.float32, sizes: Sizes = LARGE) -> tuple[Tensor, Tensor, Tensor]:
    """Two factors and a bias."""
    torch.manual_seed(0)
    rows, inner, columns = sizes
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    return left, right, torch.randn(columns, dtype=dtype)


def multiply_with(library: str) -> None:
    use_float32_products(ModelConfig.model_validate({"float32_products": library}))


@pytest.fixture(autouse=True)
def onednn() -> Iterator[None]:
    multiply_with("onednn")
    yield
    multiply_with("blas")


@pytest.mark.parametrize("left_is_turned", [False, True])
@pytest.mark.parametrize("right_is_turned", [False, True])
def test_products_of_any_layout_are_those_of_float64_to_rounding(left_is_turned: bool, right_is_turned: bool) -> None:
    left, right, bias = matrices()
    exact = left.double() @ right.double()
    left = left.T.contiguous().T if left_is_turned else left
    right = right.T.contiguous().T if right_is_turned else right
    for product, wanted in (
        (left @ right, exact),
        (torch.addmm(bias, left, right), exact + bias.double()),
        (torch.addmm(bias, left, right, beta=2, alpha=3), 3 * exact + 2 * bias.double()),
    ):
        assert product.dtype == torch.float32
        assert_close(product.double(), wanted, rtol=1e-5, atol=1e-3)


def test_a_layer_and_its_gradients_are_those_of_the_blas_to_rounding_and_not_to_the_bit() -> None:
    def layer() -> list[Tensor]:
        rows, weight, bias = (tensor.requires_grad_() for tensor in matrices())
        outputs = torch.nn.functional.linear(rows, weight.T, bias)
        return [outputs.detach(), *torch.autograd.grad(outputs.tanh().sum(), (rows, weight, bias))]

    ours = layer()
    multiply_with("blas")
    theirs = layer()
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, rtol=1e-4, atol=1e-3)
    assert not torch.equal(ours[0], theirs[0])  # it was not the BLAS twice


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float64, LARGE), (torch.float32, (8, 9, 10)), (torch.float32, (0, 9, 10))]
)
def test_other_types_and_small_products_stay_the_same_to_the_bit(dtype: torch.dtype, sizes: Sizes) -> None:
    left, right, bias = matrices(dtype, sizes)

    def products() -> list[Tensor]:
        return [left @ right, torch.addmm(bias, left, right), torch.addmm(bias, left, right, beta=2, alpha=3)]

    ours = products()
    multiply_with("blas")
    theirs = products()
    assert [product.shape for product in ours] == [(sizes[0], sizes[2])] * 3
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_by_itself_a_process_multiplies_with_what_is_faster() -> None:
    left, right, _ = matrices()
    assert onednn_gain() == onednn_gain() > 0
    multiply_with("auto")
    chosen = left @ right
    multiply_with("onednn" if onednn_gain() >= 1.5 else "blas")
    assert torch.equal(chosen, left @ right)
