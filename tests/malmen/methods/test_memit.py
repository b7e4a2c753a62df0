"""MEMIT: the closed form, the moments of keys, the subject's last token, and an edit that arrives where it wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from edit_by_hand import edit_by_hand
from tiny_models import tiny_lm
from torch.testing import assert_close
from untouched import count_hooks, digest
from worded_models import DECODERS, worded_lm

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.subjects import edits_of
from malmen.data.tokens import one_batch
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.key_moments import key_moments, read_texts
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, load_lm
from malmen.lm.overlay import edited
from malmen.methods.memit import (
    Memit,
    MemitHistory,
    Placed,
    Places,
    _parts,
    add_at,
    find_values,
    hidden_at,
    last_tokens,
    spread,
)

FACTS = edits_of(world_records("validation")[:4])


def config(folder: Path, **more: object) -> Config:
    settings = {
        "layers": "middle:2",
        "prefixes": 0,
        "covariance_weight": 1e-3,
        "clamp": 4,
        "cache_dir": str(folder),
        **more,
    }
    return Config.model_validate({"baselines": {"memit": settings}})


def test_the_closed_form_minimises_what_it_says() -> None:
    """‖S K − R‖² + w tr(S C Sᵀ), minimised by stacking √w C^½ under the keys and asking numpy for least squares."""
    rng = numpy.random.default_rng(0)
    keys, rest, sample = rng.normal(size=(5, 8)), rng.normal(size=(5, 3)), rng.normal(size=(40, 8))
    moment, weight = sample.T @ sample / 40, 0.3
    values, vectors = numpy.linalg.eigh(moment)
    root = vectors @ numpy.diag(numpy.sqrt(values)) @ vectors.T
    stacked = numpy.vstack([keys, numpy.sqrt(weight) * root])
    wanted = numpy.linalg.lstsq(stacked, numpy.vstack([rest, numpy.zeros((8, 3))]), rcond=None)[0].T
    found = spread(torch.from_numpy(keys), torch.from_numpy(rest), torch.from_numpy(moment), weight)
    assert_close(found, torch.from_numpy(wanted), rtol=1e-9, atol=1e-10)


def stacked(keys: list[torch.Tensor], rest: torch.Tensor, moment: torch.Tensor, weight: float) -> torch.Tensor:
    """The same with several sets of keys, of which all but the first are to give 0."""
    values, vectors = numpy.linalg.eigh(moment.numpy())
    root = vectors @ numpy.diag(numpy.sqrt(numpy.clip(weight * values, 0, None))) @ vectors.T
    rows = numpy.vstack([*(part.numpy() for part in keys), root])
    wanted = numpy.vstack([rest.numpy(), numpy.zeros((len(rows) - len(rest), rest.shape[1]))])
    return torch.from_numpy(numpy.linalg.lstsq(rows, wanted, rcond=None)[0].T.copy())


def test_with_a_history_the_outputs_of_earlier_keys_stay_too() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((5, 8), (5, 3), (40, 8), (6, 8))
    keys, rest, sample, earlier = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes)
    moment = sample.T @ sample / 40
    found = spread(keys, rest, moment, 0.3, earlier.T @ earlier)
    assert_close(found, stacked([keys, earlier], rest, moment, 0.3), rtol=1e-9, atol=1e-10)
    assert (found @ earlier.T).norm() < 0.5 * (spread(keys, rest, moment, 0.3) @ earlier.T).norm()


def test_two_rounds_with_the_history_are_one_solve_of_all_their_facts() -> None:
    """Where keys do not change between rounds: recursive least squares, here against both rounds at once."""
    draw = torch.Generator().manual_seed(1)
    keys, rest, sample = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((9, 8), (9, 3), (40, 8))
    )
    moment, before = sample.T @ sample / 40, keys[:4].T @ keys[:4]
    one = spread(keys[:4], rest[:4], moment, 0.3)
    left = rest[4:] - keys[4:] @ one.T
    assert_close(one + spread(keys[4:], left, moment, 0.3, before), spread(keys, rest, moment, 0.3))
    assert not torch.allclose(one + spread(keys[4:], left, moment, 0.3), spread(keys, rest, moment, 0.3), rtol=1e-2)


@pytest.mark.parametrize("name", DECODERS)
def test_rounds_with_the_history_are_those_made_by_hand_on_a_model_that_really_changes(
    name: str, tmp_path: Path
) -> None:
    lm, settings = worded_lm(name), config(tmp_path, steps=4, corpus_tokens=500)
    settings = Config.model_validate(
        {"baselines": {"memit": settings.baselines.memit, "memit_history": {"covariance_weight": 0.02}}}
    )
    method = MemitHistory(lm, settings)
    moments, series = method.moments(lm).by_layer, method.for_rounds()
    changed, places = worded_lm(name), Places(lm, settings, 0, 1)
    earlier: dict[str, list[torch.Tensor]] = {}

    def solve(layer: str, keys: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        earlier[layer] = [keys, *earlier.get(layer, [])]
        return stacked(earlier[layer], rest, moments[layer], 0.02)

    shifts: dict[str, torch.Tensor] = {}
    for facts in (FACTS[:2], FACTS[2:3], FACTS[3:]):
        with edited(lm, shifts):
            found, alone = (some.edit(lm, facts).shifts for some in (series, method))
        places.lm = changed
        wanted = edit_by_hand(changed, method.layers, facts, places, settings.baselines.memit, solve)
        for layer, shift in wanted.items():
            assert_close(found[layer], shift, rtol=1e-6, atol=1e-8 * float(shift.norm()))
        if shifts:
            assert any(not torch.allclose(found[layer], alone[layer], rtol=1e-3) for layer in found)
        shifts = {layer: shifts.get(layer, 0) + shift for layer, shift in found.items()}


def test_the_first_round_with_a_history_and_each_edit_outside_of_rounds_is_memit(tmp_path: Path) -> None:
    lm, settings = worded_lm("gpt2"), config(tmp_path, steps=4, corpus_tokens=500)
    plain, method = Memit(lm, settings), MemitHistory(lm, settings)
    wanted = plain.edit(lm, FACTS)
    series = method.for_rounds()
    for some in (series, method, method, plain.for_rounds(), plain.for_rounds()):
        assert_close(some.edit(lm, FACTS).shifts, wanted.shifts, rtol=0, atol=0)
    assert method.history is None and plain.for_rounds() is plain
    assert series.history is not None and set(series.history) == set(wanted.shifts)


def test_an_edit_that_fails_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    series = MemitHistory(lm, config(tmp_path, steps=4, corpus_tokens=500)).for_rounds()
    series.edit(lm, FACTS[:2])
    before = {name: gram.clone() for name, gram in (series.history or {}).items()}
    with pytest.raises(EditError, match="need the subject"):
        series.edit(lm, [FACTS[2], Fact("Who is it?", "Ann")])
    assert_close(series.history, before, rtol=0, atol=0)


def test_a_corpus_too_small_for_a_layer_is_a_clear_error() -> None:
    with pytest.raises(EditError, match="corpus is too small"):
        spread(torch.ones(1, 4), torch.ones(1, 2), torch.zeros(4, 4, dtype=torch.float64), 1.0)


def test_a_subject_is_found_where_a_script_does_not_part_words(tmp_path: Path) -> None:
    lm = load_lm("builtin")
    places = Places(lm, config(tmp_path), 0, 1)
    prompt = "the city of Osakajo is"
    within = places.of(Fact(prompt, "Lima", subject="Osaka"))
    assert lm.tokenizer.decode(within.encoded.input_ids[: within.position + 1]).startswith("the city of Osaka")
    with pytest.raises(EditError, match="is not in the prompt"):
        places.of(Fact(prompt, "Lima", subject="Tokyo"))


@pytest.mark.parametrize("name", DECODERS)
def test_the_subjects_hidden_states_arrive_at_their_values(name: str, tmp_path: Path) -> None:
    lm = worded_lm(name)
    before = digest(lm), count_hooks(lm)
    settings = config(tmp_path)
    found = Memit(lm, settings).edit(lm, FACTS)
    assert (digest(lm), count_hooks(lm)) == before
    assert len(found.shifts) == 2 and found.mean_residual() < 0.05
    places = Places(lm, settings, 0, 1)
    placed = [places.of(fact) for fact in FACTS]
    block = Memit(lm, settings).layers[-1].block
    plain = hidden_at(lm, block, placed, 4096)
    with edited(lm, found.shifts):
        moved = hidden_at(lm, block, placed, 4096)
    assert ((moved - plain).norm(dim=-1) > 0.5 * plain.norm(dim=-1)).all()


def value_by_hand(lm: LanguageModel, block: int, placed: list[Placed], about: Placed, h: torch.Tensor) -> torch.Tensor:
    """δ of one fact by plain torch: each text by itself, three steps of Adam, the settings of the test below."""
    module = lm.model.get_submodule(f"{lm.stacks['decoder']}.{block}")
    delta = torch.zeros_like(h, requires_grad=True)
    optimizer = torch.optim.Adam([delta], lr=0.5)

    def log_probs(ids: list[int], position: int, moved: bool) -> torch.Tensor:
        def hook(_module: object, _args: object, output: Any) -> Any:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            hidden = torch.cat(
                [hidden[:, :position], hidden[:, position : position + 1] + delta, hidden[:, position + 1 :]], 1
            )
            return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

        handle = module.register_forward_hook(hook) if moved else None
        found = lm.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        if handle:
            handle.remove()
        return found

    prompt = about.encoded.input_ids[: about.encoded.first + 1]
    kept = log_probs(prompt, about.position, False)[-1].detach()
    for _ in range(3):
        losses = []
        for one in placed:
            rows = log_probs(one.encoded.input_ids, one.position, True)[one.encoded.first :]
            losses.append(-torch.stack([row[at] for row, at in zip(rows, one.encoded.targets, strict=True)]).mean())
        moved = log_probs(prompt, about.position, True)[-1]
        drift = (moved.exp() * (moved - kept)).sum()
        loss = torch.stack(losses).mean() + 0.0625 * drift + 0.5 * (delta.square().sum() + 1e-12).sqrt() / h.norm() ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            delta *= min(1.0, float(4 * h.norm() / delta.norm()))
    return delta.detach()


@pytest.mark.parametrize("name", DECODERS)
def test_a_value_is_found_as_by_hand(name: str, tmp_path: Path) -> None:
    lm, settings = worded_lm(name), config(tmp_path, prefixes=2, steps=3)
    places = Places(lm, settings, 2, 4)
    varied = [places.with_prefixes(fact) for fact in FACTS]
    before = hidden_at(lm, 1, [places.of(fact) for fact in FACTS], 4096)
    arguments = (lm, 1, FACTS, varied, places, before, settings.baselines.memit)
    together = find_values(*arguments, 10**9)
    assert_close(find_values(*arguments, 1), together, rtol=1e-6, atol=1e-8)
    assert [len(part) for part in _parts(varied, 1)] == [1, 1, 1, 1]  # one fact at a time
    assert [len(part) for part in _parts(varied, 10**9)] == [4]
    for index, fact in enumerate(FACTS):
        about = places.of(Fact(f"{fact.subject} is a", "thing", fact.subject))
        assert_close(together[index], value_by_hand(lm, 1, varied[index], about, before[index]), rtol=1e-6, atol=1e-8)


def test_values_make_the_answers_of_a_real_model_more_probable(tmp_path: Path) -> None:
    lm, settings = load_lm("builtin"), config(tmp_path)
    places = Places(lm, settings, 0, 1)
    placed = [places.of(fact) for fact in FACTS]
    before = hidden_at(lm, 0, placed, 4096)
    found = find_values(lm, 0, FACTS, [[one] for one in placed], places, before, settings.baselines.memit, 4096)
    assert (found.norm(dim=-1) <= 4 * before.norm(dim=-1) * (1 + 1e-5)).all()
    batch = one_batch([one.encoded for one in placed], lm.pad_id)
    plain = lm.log_probs(batch).gather(1, batch.targets[:, None])
    hook = partial(add_at, found[batch.facts], last_tokens(batch, placed))
    handle = lm.blocks("decoder")[0].register_forward_hook(hook)
    moved = lm.log_probs(batch).gather(1, batch.targets[:, None])
    handle.remove()
    assert moved.sum() > plain.sum() + 1


def test_a_value_stays_once_its_answer_is_probable_enough(tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    places = Places(lm, config(tmp_path), 0, 1)
    before = hidden_at(lm, 1, [places.of(fact) for fact in FACTS], 4096)
    lazy = config(tmp_path, enough=1e9).baselines.memit
    found = find_values(lm, 1, FACTS, [[places.of(fact)] for fact in FACTS], places, before, lazy, 4096)
    assert (found == 0).all()


def test_a_prompt_that_would_be_cut_is_refused_because_its_subject_may_be(tmp_path: Path) -> None:
    settings = config(tmp_path)
    cut = settings.model_copy(
        update={"data": settings.data.model_copy(update={"max_length": 9, "overlong": "truncate"})}
    )
    with pytest.raises(EditError, match="too long for MEMIT"):
        Places(worded_lm("gpt2"), cut, 0, 1).of(FACTS[0])


@pytest.mark.parametrize(
    ("prompt", "subject", "last"),
    [
        ("What does Brollo Gearkley do for a living?", "Brollo Gearkley", "ley"),
        ("Brollo Gearkley", "Brollo Gearkley", "ley"),
        ("Brollo Gearkley is paid by", "Brollo", "lo"),
        ("Is Annapolis the town of Ann now?", "Ann", "n"),
    ],
)
def test_the_subjects_last_token_is_found(prompt: str, subject: str, last: str, tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    places = Places(lm, config(tmp_path), 2, 3)
    for placed in places.with_prefixes(Fact(prompt, "Lisbon", subject)):
        ids = placed.encoded.input_ids
        assert lm.tokenizer.decode(ids[placed.position : placed.position + 1]).strip() == last
        assert lm.tokenizer.decode(ids[: placed.position + 1]).endswith(subject)


def test_a_fact_without_a_subject_is_a_clear_error(tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    method = Memit(lm, config(tmp_path))
    with pytest.raises(EditError, match="need the subject of 'Who is it"):
        method.edit(lm, [Fact("Who is it?", "Ann")])
    with pytest.raises(EditError, match="is not in the prompt"):
        method.edit(lm, [replace(FACTS[0], subject="Nobody")])


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="values are set at subjects' last tokens in decoders"):
        Memit(tiny_lm("t5"), config(tmp_path))


def moments_by_hand(lm: LanguageModel, layer: str, texts: list[str]) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    module = lm.model.get_submodule(layer)
    handle = module.register_forward_hook(lambda _m, args, _o: rows.append(args[0].detach().flatten(0, -2)))
    for text in texts:
        lm.model(torch.tensor([lm.tokenizer(text)["input_ids"]]))
    handle.remove()
    keys = torch.cat(rows)
    return keys.T @ keys / len(keys)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_moments_are_the_mean_over_all_tokens_however_they_are_batched_and_are_kept(
    name: str, tmp_path: Path
) -> None:
    lm = worded_lm(name)
    layers = find_layers(lm.model, "last:2")
    texts = [fact.prompt for fact in FACTS]
    for budget in (7, 4096):
        found = key_moments(lm, layers, texts, 10_000, token_budget=budget, cache=tmp_path / str(budget))
        for layer in layers:
            assert_close(found.by_layer[layer.name], moments_by_hand(lm, layer.name, texts), rtol=1e-9, atol=1e-12)
    runs: list[object] = []
    lm.model.register_forward_hook(lambda *_: runs.append(_))
    again = key_moments(lm, layers, texts, 10_000, cache=tmp_path / "7")
    assert runs == []
    assert_close(again.by_layer, found.by_layer, rtol=1e-9, atol=1e-12)
    assert again.seconds > 0  # what it took when it was computed
    key_moments(lm, layers, texts, 5, cache=tmp_path / "7")
    assert runs  # other settings are another file


def test_a_corpus_is_read_only_as_far_as_it_is_needed(tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    layers = find_layers(lm.model, "last:1")
    read: list[int] = []

    def endless() -> Iterator[str]:
        for number in count():
            read.append(number)
            yield FACTS[number % len(FACTS)].prompt

    found = key_moments(lm, layers, endless(), 20, cache=tmp_path / "endless")
    assert 0 < len(read) < 1000
    same = key_moments(lm, layers, [fact.prompt for fact in FACTS] * 20, 20, cache=tmp_path / "repeated")
    assert_close(found.by_layer, same.by_layer, rtol=1e-12, atol=0)


def test_the_moments_are_computed_once_for_several_edits(tmp_path: Path) -> None:
    lm = worded_lm("gpt2")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(fact.prompt for fact in FACTS))
    memit = Memit(lm, config(tmp_path, corpus=str(corpus)))
    first = memit.moments(lm)
    corpus.unlink()
    assert memit.moments(lm) is first


def test_a_corpus_without_text_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(EditError, match="holds no text"):
        list(read_texts(tmp_path / "empty.txt"))
    with pytest.raises(EditError, match="cannot read the corpus"):
        list(read_texts(tmp_path / "absent.txt"))
