"""MEND: MALMEN's hyper-network, whose shifts are added up instead of being solved for (Mitchell et al., ICLR 2022).

S* = Σ_j S_j = Σ_j −η ∇̃_v L ũᵀ (appendix A.2). It is meta-trained like MALMEN, on many edits at once and with the LM and
the hyper-network back-propagated separately, as the paper does "to scale MEND to multiple editing".
"""

from __future__ import annotations

from typing import Any

import torch

from malmen.config import Config
from malmen.editor import Editor
from malmen.least_squares import token_residuals
from malmen.lm.trace import Traces

SETTINGS = {"aggregation": "sum", "tokens": "all"}  # the editor's


def mend_settings(config: Config) -> dict[str, Any]:
    """The settings of the editor, by `section.key`, that make it MEND."""
    own = config.baselines.mend.model_dump(exclude_none=True)
    return {f"editor.{key}": value for key, value in (SETTINGS | own).items()}


@torch.no_grad()
def sum_residual(editor: Editor, traces: Traces) -> float:
    """MR of a sum: the mean of ‖S*u_j − d_j‖ / ‖d_j‖ with d_j = S_j u_j, over layers and tokens (§5.2)."""
    residuals = []
    for name, targets in editor.layer_targets(traces).items():
        pseudo_keys, scaled_grads = (part.double() for part in targets)
        keys = traces[name].keys.double()
        wanted = (pseudo_keys * keys).sum(-1, keepdim=True) * scaled_grads
        residuals.append(token_residuals(keys, scaled_grads.T @ pseudo_keys, wanted))
    return float(torch.cat(residuals).mean())
