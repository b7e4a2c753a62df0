"""Drift along the unedited model's own words."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from malmen.config import Config
from malmen.data.tokens import EncodedFact, make_batches
from malmen.data.world import world_records
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, load_lm
from malmen.lm.overlay import edited
from malmen.lm.own_text import evaluation_texts
from malmen.measure.drift import SURE, drift_of_edit, drift_of_rounding

CONFIG = Config.model_validate({"own_text": {"max_tokens": 12}})


@pytest.fixture(scope="module")
def texts(lm: LanguageModel) -> list[EncodedFact]:
    return evaluation_texts(lm, CONFIG, world_records("validation")[:20], 24)["raw"]


def _shifts(lm: LanguageModel, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        layer.name: scale * torch.randn(layer.value_size, layer.key_size) for layer in find_layers(lm.model, "last:2")
    }


def test_no_edit_is_no_drift(lm: LanguageModel, texts: list[EncodedFact]) -> None:
    drift = drift_of_edit(lm, texts, {}, 200)
    assert (drift.kl, drift.kl_p95, drift.agreement, drift.sure_agreement) == (0.0, 0.0, 1.0, 1.0)
    assert (drift.unchanged_10, drift.unchanged_20) == (1.0, 1.0)


def test_drift_is_what_one_text_at_a_time_shows(lm: LanguageModel, texts: list[EncodedFact]) -> None:
    shifts = _shifts(lm, 0.2)
    divergences, same, sure = [], [], []
    for text in texts:
        (batch,) = make_batches([text], 1, 0)
        old = lm.log_probs(batch)
        with edited(lm, shifts):
            new = lm.log_probs(batch)
        for token in range(len(text.targets)):
            divergences.append(float((old[token].exp() * (old[token] - new[token])).sum()))
            same.append(bool(old[token].argmax() == new[token].argmax()))
            top = sorted(old[token].tolist())[-2:]
            sure.append(top[1] - top[0] >= SURE)
    drift = drift_of_edit(lm, texts, shifts, 100)
    assert_close(drift.kl, sum(divergences) / len(divergences), rtol=1e-4, atol=1e-6)
    assert_close(drift.kl_p95, float(torch.tensor(divergences).quantile(0.95)), rtol=1e-4, atol=1e-6)
    assert drift.agreement == pytest.approx(sum(same) / len(same)) and 0 < drift.agreement < 1
    of_sure = [agrees for agrees, certain in zip(same, sure, strict=True) if certain]
    assert drift.sure_agreement == pytest.approx(sum(of_sure) / len(of_sure))


def test_where_other_prompts_are_read_the_model_after_them_is_compared(
    lm: LanguageModel, texts: list[EncodedFact]
) -> None:
    before = lm.tokenizer("Where is it?")["input_ids"]
    read = [EncodedFact([*before, *text.input_ids], len(before) + text.first, text.targets) for text in texts]
    divergences, same = [], []
    for text, longer in zip(texts, read, strict=True):
        old, new = (
            lm.model(torch.tensor([one.input_ids])).logits[0, one.first :].log_softmax(-1) for one in (text, longer)
        )
        divergences += (old.exp() * (old - new)).sum(-1).tolist()
        same += (old.argmax(-1) == new.argmax(-1)).tolist()
    for budget in (1, 300):
        drift = drift_of_edit(lm, texts, {}, budget, read=read)
        assert_close(drift.kl, sum(divergences) / len(divergences), rtol=1e-4, atol=1e-6)
        assert drift.agreement == pytest.approx(sum(same) / len(same)) and 0 < drift.agreement < 1


def test_a_text_counts_as_unchanged_where_the_edited_model_writes_it_again(
    lm: LanguageModel, texts: list[EncodedFact]
) -> None:
    shifts, records = _shifts(lm, 0.2), world_records("validation")[:20]
    with edited(lm, shifts):
        after = evaluation_texts(lm, CONFIG, records, 24)["raw"]
    same = [old.targets == new.targets for old, new in zip(texts, after, strict=True)]
    assert 0 < sum(same) < len(same)
    assert max(len(text.targets) for text in texts) <= 10
    drift = drift_of_edit(lm, texts, shifts, 300)
    assert drift.unchanged_10 == drift.unchanged_20 == sum(same) / len(same)


def test_the_floor_leaves_the_weights_as_they_were(texts: list[EncodedFact]) -> None:
    lm = load_lm(Config().model)
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    floor = drift_of_rounding(lm, texts, 300)
    assert floor is not None and 0 < floor.kl < 1e-3
    for name, weight in lm.model.named_parameters():
        assert torch.equal(weight, before[name]), name
    lm.model.to(torch.bfloat16)
    assert drift_of_rounding(lm, texts, 300) is None  # it is rounded already
