"""Whether what lies next to an edit stays: other facts about its subject, the same relation of others.

No answer is given for these prompts, and none is needed: what the unedited model writes after them is to stay, right or
wrong. The drift along these texts is measured as along its texts after unrelated prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from malmen.config import Config
from malmen.data.records import EditRecord, neighbours_of_all
from malmen.edit_method import Rewrite
from malmen.lm.generate import OnProgress
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import Shifts
from malmen.lm.own_text import texts_after, texts_behind
from malmen.measure.drift import drift_of_edit, drift_of_rounding
from malmen.measure.protocol import FORMS, Measured, Protocol
from malmen.metrics import FLOOR

SCORERS = {
    "kl": "KL(unedited ‖ edited) in nats, the mean over tokens",
    "kl_p95": "95th percentile of KL(unedited ‖ edited) over tokens",
    "agreement": "share of tokens where both models find the same token most probable",
    "sure_agreement": "the same, of tokens where the unedited model is sure",
    "unchanged_10": "share of texts whose first 10 tokens the edited model writes again",
    "unchanged_20": "share of texts whose first 20 tokens the edited model writes again",
}


def measure_neighbours(
    lm: LanguageModel, records: Sequence[EditRecord], shifts: Shifts, config: Config, *,
    rewrite: Rewrite | None = None, on_progress: OnProgress | None = None,
) -> list[Measured]:  # fmt: skip
    """Drift along the unedited model's texts after the records' neighbours, and the floor; nothing without any.

    `rewrite` is the edited model's, see `evaluate`. `on_progress` counts texts.
    """
    prompts = neighbours_of_all(records)
    if not prompts:
        return []
    form, budget = config.data.prompt_format, config.batch.token_budget
    texts = texts_after(lm, config, prompts, [form], on_progress)
    read = texts_behind(lm, config, prompts, texts, rewrite)[form] if rewrite else None
    drift = drift_of_edit(lm, texts[form], shifts, budget, read=read)
    floor = drift_of_rounding(lm, texts[form], budget)
    reading = f"the unedited model's greedy text, at most {config.own_text.max_tokens} tokens, read by both models"
    measured = Measured({}, {})
    for suffix, values in (("", drift), (FLOOR, floor)):
        for name, value in vars(values).items() if values else ():
            measured.scores[f"neighbours_{name}{suffix}"] = value
            protocol = Protocol(FORMS[form], reading, SCORERS[name], len(prompts))
            measured.protocols[f"neighbours_{name}{suffix}"] = protocol
    return [measured]
