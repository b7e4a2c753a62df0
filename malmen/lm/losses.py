"""The edit loss of Alg. 1 and the meta loss of eq. 1, as sums; whoever knows the global counts divides."""

from __future__ import annotations

from torch import Tensor


def nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """−Σ log p(y|x) over answer tokens; log_probs (tokens, vocabulary)."""
    return -log_probs.gather(1, targets[:, None]).sum()


def kl(reference: Tensor, log_probs: Tensor) -> Tensor:
    """Σ KL(p_W ‖ p_W̃) over answer tokens; both (tokens, vocabulary) in log space."""
    return (reference.exp() * (reference - log_probs)).sum()
