"""float32 products on a CPU, by whichever of torch's two libraries is faster there.

torch multiplies float32 matrices with its BLAS, and those of bfloat16 with oneDNN. Builds with Intel's MKL reach half
of an AMD CPU's rate, because MKL leaves its AVX-512 instructions unused; oneDNN uses them. Both add up in float32, so
their results differ by rounding only.
"""

from __future__ import annotations

import math
import warnings
from functools import cache, partial
from timeit import repeat

import torch
from torch import Tensor

from malmen.config import ModelConfig
from malmen.errors import UsageError

_WORTH_IT = 1.5  # times as fast, to leave torch's own way
_SMALLEST = 2**20  # multiplications of a product, below which the call costs more than it saves
_NARROWEST = 16  # size of a matrix, below which it is rather a vector, and the BLAS is faster


class _Choice:
    """What this process multiplies with. Like torch's number of threads it holds for the whole process."""

    onednn = False


def use_float32_products(config: ModelConfig) -> None:
    """Multiply as `model.float32_products` says, from now on and everywhere in this process."""
    wanted = config.float32_products
    if wanted == "onednn" and not onednn_gain():
        raise UsageError(
            "model.float32_products is `onednn`, but this torch was built without it; use `auto` or `blas`"
        )
    _Choice.onednn = wanted == "onednn" or (wanted == "auto" and onednn_gain() >= _WORTH_IT)
    if _Choice.onednn:
        _replace_kernels()


@cache
def onednn_gain() -> float:
    """How many times as fast as the BLAS oneDNN multiplies float32 here; 0 if torch was built without it. Takes 0.1 s,
    once in a process."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0.0
    left, right = torch.ones(256, 1024), torch.ones(1024, 1024)
    seconds = [
        min(repeat(partial(product, left, right), number=1, repeat=5)) for product in (_by_blas, _by_onednn)
    ]  # fmt: skip
    return seconds[0] / seconds[1]


@cache
def _replace_kernels() -> torch.library.Library:
    """Put `_mm` and `_addmm` in place of torch's own, below autograd. They stay as long as the result is held."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced is what is wanted
        library.impl("mm", _mm, "CPU", allow_override=True)
        library.impl("addmm", _addmm, "CPU", allow_override=True)
    return library


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return _by_onednn(left, right) if _is_for_onednn(left, right) else _by_blas(left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    plain = beta == alpha == 1 and bias.shape == right.shape[1:]
    if plain and _is_for_onednn(left, right):
        return _by_onednn(left, right, bias)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=_room(left, right))


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    sizes = *left.shape, right.shape[1]
    large = min(sizes) >= _NARROWEST and math.prod(sizes) >= _SMALLEST
    return _Choice.onednn and large and left.dtype == right.dtype == torch.float32


def _by_onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right + bias, of matrices in any layout."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(left), _dense(right).T, bias, "none", [], "")
    return product


def _dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps between its rows or columns. For a slice of a wider one oneDNN has no fast kernel: it
    falls back to a reference that takes a thousand times as long."""
    return matrix if matrix.is_contiguous() or matrix.T.is_contiguous() else matrix.contiguous()


def _by_blas(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out=_room(left, right))


def _room(left: Tensor, right: Tensor) -> Tensor:
    """An empty result. The variants that write into one are other kernels, which stay torch's own."""
    return left.new_empty(left.shape[0], right.shape[1])
