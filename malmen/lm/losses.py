"""The edit loss of Alg. 1 and the meta loss of eq. 1, as sums; whoever knows the global counts divides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS_AT_ONCE = 64  # bounds the temporaries over the vocabulary


def nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """−Σ log p(y|x) over answer tokens; log_probs (tokens, vocabulary)."""
    return -log_probs.gather(1, targets[:, None]).sum()


def kl(reference: Tensor, log_probs: Tensor) -> Tensor:
    """Σ KL(p_W ‖ p_W̃) over answer tokens; both (tokens, vocabulary) in log space. The reference takes no gradient."""
    return _KL.apply(reference, log_probs)  # type: ignore[no-any-return, no-untyped-call]


class _KL(torch.autograd.Function):
    """Keeps nothing but the reference, where autograd would keep three tensors over the vocabulary."""

    @staticmethod
    def forward(ctx: Any, reference: Tensor, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(reference)
        parts = zip(reference.split(_ROWS_AT_ONCE), log_probs.split(_ROWS_AT_ONCE), strict=True)
        return torch.stack([(rows.exp() * (rows - others)).sum() for rows, others in parts]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (reference,) = ctx.saved_tensors
        return None, reference.exp().mul_(-grad)
