"""FT is AdamW on the weights of some FFNs, and touches nothing else."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.testing import assert_close
from untouched import count_hooks, digest
from worded_models import DECODERS, worded_lm

from malmen.config import Config
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.layers import is_conv1d
from malmen.lm.losses import nll
from malmen.lm.model import encode_batches, fact_encoder
from malmen.lm.overlay import edited
from malmen.methods.fine_tune import FineTune

FACTS = [record.edit for record in world_records("validation")[:7]]
CONFIG = Config.model_validate(
    {
        "seed": 4,
        "baselines": {"ft": {"layers": "last:2", "lr": 0.01, "weight_decay": 0.1, "epochs": 3, "batch_facts": 3}},
    }
)


@pytest.mark.parametrize("name", DECODERS)
def test_the_shift_is_what_adamw_does_to_a_trainable_copy(name: str) -> None:
    """The copy is trained fact by fact with torch alone: no overlay, no batches, no losses of ours."""
    lm = worded_lm(name)
    found = FineTune(lm, CONFIG).edit(lm, FACTS).shifts
    encoder, model = fact_encoder(lm, CONFIG.data), copy.deepcopy(lm.model)
    trained = [model.get_parameter(f"{layer}.weight").requires_grad_() for layer in found]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    encoded = [encoder.encode(fact) for fact in FACTS]
    for epoch in range(3):
        order = random.Random(f"ft/4/{epoch}").sample(encoded, len(encoded))
        for first in range(0, 7, 3):
            some = order[first : first + 3]
            optimizer.zero_grad()
            for fact in some:
                logits = model(torch.tensor([fact.input_ids])).logits[0, fact.first :]
                loss = torch.nn.functional.cross_entropy(logits, torch.tensor(fact.targets), reduction="sum")
                (loss / len(some)).backward()
            optimizer.step()
    for layer, shift in found.items():
        change = model.get_parameter(f"{layer}.weight") - lm.model.get_parameter(f"{layer}.weight")
        wanted = change.T if is_conv1d(lm.model.get_submodule(layer)) else change
        # Adam divides by the gradient's own size, so where that is near zero a step of 0.01 carries its rounding, which
        # differs from CPU to CPU (2.7e-12 seen on one where others had less than 1e-12): 1e-11 is 1e-9 of such a step.
        assert_close(shift, wanted, rtol=1e-9, atol=1e-11)


def test_only_the_ffns_of_the_chosen_blocks_are_tuned_and_the_model_stays_as_it_is() -> None:
    lm = worded_lm("gpt2")
    before = digest(lm), count_hooks(lm)
    found = FineTune(lm, CONFIG).edit(lm, FACTS)
    assert (digest(lm), count_hooks(lm)) == before
    assert sorted(found.shifts) == [
        f"transformer.h.{block}.mlp.{name}" for block in (2, 3) for name in ("c_fc", "c_proj")
    ]
    (batch,) = encode_batches(lm, FACTS, CONFIG)
    losses = []
    for shifts in ({}, found.shifts):
        with torch.no_grad(), edited(lm, shifts):
            losses.append(float(nll(lm.log_probs(batch), batch.targets)))
    assert losses[1] < losses[0]
    assert found.mean_residual() is None


def test_no_facts_are_an_error() -> None:
    lm = worded_lm("gpt2")
    with pytest.raises(EditError, match="no facts"):
        FineTune(lm, CONFIG).edit(lm, [])
