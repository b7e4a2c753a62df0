"""The two ways to multiply float32 on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from malmen.config import ModelConfig
from malmen.errors import UsageError
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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda matrix: matrix,
    "columns": lambda matrix: matrix.T.contiguous().T,
    "a slice": lambda matrix: torch.nn.functional.pad(matrix, (8, 20))[:, 8:-20],
    "a slice of columns": lambda matrix: torch.nn.functional.pad(matrix.T, (8, 20))[:, 8:-20].T,
}


@pytest.mark.parametrize("left_layout", LAYOUTS)
@pytest.mark.parametrize("right_layout", LAYOUTS)
def test_products_of_any_layout_are_those_of_float64_to_rounding(left_layout: str, right_layout: str) -> None:
    left, right, bias = matrices()
    exact = left.double() @ right.double()
    left, right = LAYOUTS[left_layout](left), LAYOUTS[right_layout](right)
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


def test_a_torch_without_onednn_says_so_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malmen.lm.products.onednn_gain", lambda: 0.0)
    with pytest.raises(UsageError, match=r"built without it; use `auto` or `blas`"):
        multiply_with("onednn")
    multiply_with("auto")


@pytest.mark.slow  # a fresh interpreter imports torch
def test_no_layout_falls_back_to_onednns_slow_reference() -> None:
    """Which takes a thousand times as long; oneDNN says which of its kernels it runs."""
    code = """
from test_products import LAYOUTS, matrices, multiply_with
multiply_with("onednn")
left, right, bias = matrices()
for turn_left in LAYOUTS.values():
    for turn_right in LAYOUTS.values():
        turn_left(left) @ turn_right(right)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "ONEDNN_VERBOSE": "1", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    kernels = [line.split(",")[6] for line in ran.stdout.splitlines() if ",exec," in line and "reorder" not in line]
    assert len(kernels) >= len(LAYOUTS) ** 2  # the test of which library is faster comes before
    assert [kernel for kernel in kernels if "ref" in kernel] == []
