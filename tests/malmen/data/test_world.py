from __future__ import annotations

import pytest

from malmen.config import Config
from malmen.data.world import NUM_HELD_OUT, WORLD_MODEL, check_world_model, make_world, relations, world_records
from malmen.evaluate import predict_tokens
from malmen.lm.model import fact_encoder, load_lm


@pytest.mark.slow
def test_the_shipped_model_knows_the_facts_it_claims_to_know() -> None:
    manifest = check_world_model()
    assert float(str(manifest["accuracy"])) >= 0.99
    lm, config = load_lm("builtin"), Config()
    facts = make_world().facts()[::7]
    encoder = fact_encoder(lm, config.data)
    encoded = [encoder.encode(fact) for fact in facts]
    right = [found == fact.targets for found, fact in zip(predict_tokens(lm, encoded, 4096), encoded, strict=True)]
    assert sum(right) / len(right) >= 0.99


def test_the_shipped_model_is_small() -> None:
    assert sum(path.stat().st_size for path in WORLD_MODEL.iterdir()) < 8_000_000


def test_train_and_validation_share_no_subject() -> None:
    train, held_out = (
        {record.id.split("/")[1] for record in world_records(split)} for split in ("train", "validation")
    )
    assert len(held_out) == NUM_HELD_OUT
    assert not train & held_out
    for record in world_records("train"):
        assert not any(name in fact.prompt for fact in record.unrelated for name in held_out)


def test_edits_contradict_the_truth_and_equivalents_agree_with_the_edit() -> None:
    truth = {fact.prompt: fact.answer for fact in make_world().facts()}
    for record in world_records("validation"):
        assert truth[record.edit.prompt] != record.edit.answer
        assert {fact.answer for fact in record.equivalents} == {record.edit.answer}
        assert all(truth[fact.prompt] == fact.answer for fact in record.unrelated)
        assert not {fact.prompt for fact in record.unrelated} & {fact.prompt for fact in record.equivalents}


def test_records_are_determined_by_their_seed() -> None:
    assert world_records("train", 3) == world_records("train", 3)
    assert world_records("train", 3) != world_records("train", 4)
    assert make_world().fingerprint() == make_world().fingerprint() != make_world(1).fingerprint()


def test_answers_and_phrasings_are_distinct() -> None:
    for relation in relations():
        assert len(set(relation.answers)) == len(relation.answers)
        assert len(set(relation.phrasings)) == 4
