"""MEND: MALMEN's hyper-network, whose shifts are added up instead of being solved for (Mitchell et al., ICLR 2022).

S* = Σ_j S_j = Σ_j −η ∇̃_v L ũᵀ (appendix A.2). It is meta-trained like MALMEN, on many edits at once and with the LM and
the hyper-network back-propagated separately, as the paper does "to scale MEND to multiple editing".
"""

from __future__ import annotations

from malmen.config import Config

SETTINGS = {"aggregation": "sum", "tokens": "all"}  # what makes an editor MEND


def mend_config(config: Config) -> Config:
    """The same run with MEND in MALMEN's place."""
    return config.model_copy(update={"editor": config.editor.model_copy(update=SETTINGS)})
