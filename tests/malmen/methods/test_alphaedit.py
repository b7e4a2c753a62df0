"""AlphaEdit: the constrained least squares, what it leaves alone, and its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from edit_by_hand import edit_by_hand
from torch import Tensor
from torch.testing import assert_close
from untouched import count_hooks, digest
from worded_models import DECODERS, worded_lm

from malmen.config import AlphaEditConfig, Config
from malmen.data.subjects import edits_of
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.overlay import edited
from malmen.methods.alphaedit import AlphaEdit, projected, smallest_directions
from malmen.methods.memit import Places

FACTS = edits_of(world_records("validation")[:5])


def config(folder: Path, memit: dict[str, object] | None = None, **own: object) -> Config:
    values = {
        "layers": "middle:2",
        "prefixes": 0,
        "clamp": 4,
        "steps": 4,
        "corpus_tokens": 500,
        "cache_dir": str(folder),
    }
    return Config.model_validate({"baselines": {"memit": {**values, **(memit or {})}, "alphaedit": own}})


def constrained(keys: Tensor, rest: Tensor, moment: Tensor, free: int, damping: float, history: Tensor) -> Tensor:
    """Minimise ‖S K − R‖² + tr(S H Sᵀ) + λ‖S‖² where S v = 0 for each large eigenvector v: by Lagrange's multipliers,
    in numpy, without a projection."""
    size, kept = len(moment), len(moment) - free
    large = numpy.linalg.svd(moment.numpy())[0][:, :kept]  # from the largest
    gram = (keys.T @ keys + history).numpy() + damping * numpy.eye(size)
    system = numpy.block([[gram, large], [large.T, numpy.zeros((kept, kept))]])
    right = numpy.vstack([(keys.T @ rest).numpy(), numpy.zeros((kept, rest.shape[1]))])
    return torch.from_numpy(numpy.linalg.solve(system, right)[:size].T.copy())


def problem(facts: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Keys of 8 numbers, residuals of 3, and a moment with eigenvalues on both sides of 0.02."""
    draw = torch.Generator().manual_seed(seed)
    keys, rest, sample, earlier = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((facts, 8), (facts, 3), (40, 8), (6, 8))
    )
    sample *= torch.tensor([1, 1, 1, 0.05, 0.04, 0.03, 0.02, 0.01])  # of the directions
    return {"keys": keys, "rest": rest, "moment": sample.T @ sample / 40, "history": earlier.T @ earlier}


@pytest.mark.parametrize("damping", [1.0, 1e-3])
@pytest.mark.parametrize("facts", [2, 5, 20])  # fewer and more than there are free directions
def test_the_shift_is_the_constrained_minimum(facts: int, damping: float) -> None:
    given = problem(facts)
    free = smallest_directions(given["moment"], AlphaEditConfig())
    assert free.shape == (8, 5)
    for history in (None, given["history"]):
        shift = projected(given["keys"], given["rest"], free, damping, history)
        zero = torch.zeros(8, 8, dtype=torch.float64)
        wanted = constrained(
            given["keys"], given["rest"], given["moment"], 5, damping, zero if history is None else history
        )
        assert_close(shift, wanted, rtol=1e-8, atol=1e-11)


def test_the_shift_solves_the_equation_with_the_projection_and_its_gradient_has_no_free_part() -> None:
    """[P (K Kᵀ + H) + λI] X = P K Rᵀ as it is written, and the first-order condition by autograd."""
    given, damping = problem(), 0.3
    keys, rest, history = given["keys"], given["rest"], given["history"]
    free = smallest_directions(given["moment"], AlphaEditConfig())
    shift = projected(keys, rest, free, damping, history)
    large = torch.linalg.svd(given["moment"])[0][:, :3]
    identity = torch.eye(8, dtype=torch.float64)
    projection = identity - large @ large.T
    system = projection @ (keys.T @ keys + history) + damping * identity
    assert_close(shift, torch.linalg.solve(system, projection @ keys.T @ rest).T, rtol=1e-9, atol=1e-12)
    leaf = shift.clone().requires_grad_()
    loss = (keys @ leaf.T - rest).square().sum() + (leaf @ history @ leaf.T).trace() + damping * leaf.square().sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    assert_close(grad @ projection, torch.zeros_like(grad), rtol=0, atol=1e-11)
    assert float((grad @ large).norm()) > 1e-3  # the constraint holds it back


def test_two_rounds_with_the_history_are_one_solve_of_all_their_facts() -> None:
    """Where keys do not change between rounds: recursive least squares."""
    first, second = problem(4, seed=1), problem(6, seed=2)
    free = smallest_directions(first["moment"], AlphaEditConfig())
    one = projected(first["keys"], first["rest"], free, 0.3)
    rest = second["rest"] - second["keys"] @ one.T
    two = projected(second["keys"], rest, free, 0.3, first["keys"].T @ first["keys"])
    keys, wanted = (torch.cat([first[name], second[name]]) for name in ("keys", "rest"))
    assert_close(one + two, projected(keys, wanted, free, 0.3), rtol=1e-9, atol=1e-11)
    forgetful = one + projected(second["keys"], rest, free, 0.3)
    assert not torch.allclose(one + two, forgetful, rtol=1e-2)


def test_directions_are_chosen_by_threshold_or_by_share() -> None:
    moment = torch.diag(torch.tensor([3.0, 0.5, 0.01, 0.1], dtype=torch.float64))
    assert_close(smallest_directions(moment, AlphaEditConfig()).abs(), torch.eye(4, dtype=torch.float64)[:, [2]])
    by_share = smallest_directions(moment, AlphaEditConfig(free_share=0.5))
    assert_close(by_share.abs(), torch.eye(4, dtype=torch.float64)[:, [2, 3]])
    assert smallest_directions(moment, AlphaEditConfig(free_share=0.01)).shape == (4, 1)
    with pytest.raises(
        EditError, match=r"below baselines.alphaedit.threshold=0.005: the smallest is 0.01, .*free_share"
    ):
        smallest_directions(moment, AlphaEditConfig(threshold=0.005))


def test_a_layer_without_free_directions_is_named(tmp_path: Path) -> None:
    with pytest.raises(EditError, match=r"layer transformer.h.1.mlp.c_proj: no eigenvalue"):
        AlphaEdit(worded_lm("gpt2"), config(tmp_path, threshold=1e-30)).edit(worded_lm("gpt2"), FACTS)


@pytest.mark.parametrize("name", DECODERS)
def test_texts_that_the_moments_come_from_are_read_as_before(name: str, tmp_path: Path) -> None:
    """They have fewer tokens than keys have numbers; what their keys do not span is free, and nothing else."""
    lm, corpus = worded_lm(name), tmp_path / "corpus.txt"
    texts = [FACTS[0].prompt, "the city of Lima"]
    corpus.write_text("\n".join(texts))
    tokens = [torch.tensor([lm.tokenizer(text)["input_ids"]]) for text in texts]
    method = AlphaEdit(lm, config(tmp_path, {"corpus": str(corpus)}, threshold=1e-15, damping=1e-9))
    state = digest(lm), count_hooks(lm)
    edit = method.edit(lm, FACTS[1:])
    assert (digest(lm), count_hooks(lm)) == state
    num_tokens = sum(ids.numel() for ids in tokens)
    for layer in method.layers:
        assert method.free_directions(lm)[layer.name].shape == (layer.key_size, layer.key_size - num_tokens)
    model: Any = lm.model
    other = torch.tensor([lm.tokenizer(FACTS[1].prompt)["input_ids"]])
    with torch.no_grad():
        before = [model(ids).logits for ids in (*tokens, other)]
        with edited(lm, edit.shifts):
            after = [model(ids).logits for ids in (*tokens, other)]
    for old, new in zip(before[:-1], after[:-1], strict=True):
        assert_close(new, old, rtol=1e-9, atol=1e-11)
    assert float((after[-1] - before[-1]).norm()) > 1e-4 * float(before[-1].norm())


@pytest.mark.parametrize("name", DECODERS)
def test_rounds_are_those_made_by_hand_on_a_model_that_really_changes(name: str, tmp_path: Path) -> None:
    """Values are MEMIT's; each layer's shift is the constrained minimum with the keys of the facts before."""
    lm, settings = worded_lm(name), config(tmp_path, free_share=0.6, damping=1e-4)
    method = AlphaEdit(lm, settings)
    moments, series = method.moments(lm).by_layer, method.for_rounds()
    changed, places = worded_lm(name), Places(lm, settings, 0, 1)
    earlier: dict[str, Tensor] = {}

    def solve(layer: str, keys: Tensor, rest: Tensor) -> Tensor:
        history = earlier.get(layer, torch.zeros_like(moments[layer]))
        earlier[layer] = history + keys.T @ keys
        return constrained(keys, rest, moments[layer], int(0.6 * len(history)), 1e-4, history)

    shifts: dict[str, Tensor] = {}
    for facts in (FACTS[:2], FACTS[2:4], FACTS[4:]):
        with edited(lm, shifts):
            new = series.edit(lm, facts).shifts
        places.lm = changed
        wanted = edit_by_hand(changed, method.layers, facts, places, settings.baselines.memit, solve)
        for layer, shift in wanted.items():
            assert_close(new[layer], shift, rtol=1e-6, atol=1e-8 * float(shift.norm()))
        shifts = {layer: shifts.get(layer, 0) + shift for layer, shift in new.items()}
    assert method.history is None and method.for_rounds().history == {}
