"""MEND: MALMEN's hyper-network, whose shifts are added up instead of being solved for (Mitchell et al., ICLR 2022).

S* = Σ_j S_j = Σ_j −η ∇̃_v L ũᵀ (appendix A.2). It is meta-trained like MALMEN, on many edits at once and with the LM and
the hyper-network back-propagated separately, as the paper does "to scale MEND to multiple editing".
"""

from __future__ import annotations

import torch

from malmen.config import Config
from malmen.editor import Editor
from malmen.trace import Traces

SETTINGS = {"aggregation": "sum", "tokens": "all"}  # what makes an editor MEND


def mend_config(config: Config) -> Config:
    """The same run with MEND in MALMEN's place."""
    return config.model_copy(update={"editor": config.editor.model_copy(update=SETTINGS)})


@torch.no_grad()
def sum_residual(editor: Editor, traces: Traces) -> float:
    """MR of a sum: the mean of ‖S*u_j − d_j‖ / ‖d_j‖ with d_j = S_j u_j, over layers and tokens (§5.2)."""
    residuals = []
    for name, wishes in editor.wishes(traces).items():
        pseudo_keys, scaled_grads = (part.double() for part in wishes)
        keys = traces[name].keys.double()
        wanted = (pseudo_keys * keys).sum(-1, keepdim=True) * scaled_grads
        shift = scaled_grads.T @ pseudo_keys
        missed = keys @ shift.T - wanted
        residuals.append(missed.norm(dim=-1) / wanted.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny))
    return float(torch.cat(residuals).mean())
