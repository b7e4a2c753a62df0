"""MEMIT: a value for each fact at its subject's last token, spread over several layers (Meng et al., ICLR 2023).

For each fact, δ moves the hidden state h that the last edited block puts out at the subject's last token, so that the
answer becomes probable. Layer by layer, what is left of δ is shared among the layers still to come:
S = R Kᵀ (w C + K Kᵀ)⁻¹, with the keys K of the subjects, their residuals R, and the second moment C of all other keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from malmen.config import Config, MemitConfig
from malmen.data.records import Fact
from malmen.data.splits import training_records
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.edit_method import PlainEdit, UntrainedMethod, finite, require_facts
from malmen.errors import EditError
from malmen.lm.hooks import hooked
from malmen.lm.key_moments import KeyMoments, key_moments, read_texts
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.methods.subject_tokens import Placed, Places, add_at, block_of, hidden_at, keys_at, last_tokens


class Memit(UntrainedMethod):
    """Needs the model, text to estimate the keys' moments from, and the subjects of the facts."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        if lm.kind != "decoder":
            raise EditError(f"MEMIT edits decoders, by their subjects' last tokens; this model is of kind {lm.kind}")
        if len({parameter.device for parameter in lm.model.parameters()}) > 1:
            raise EditError("MEMIT needs the whole model on one device; model.device=split is for other methods")
        self.config, self.settings = config, config.baselines.memit
        self._moments: KeyMoments | None = None
        self.layers = sorted(find_layers(lm.model, self.settings.layers, "second"), key=lambda layer: layer.block)

    def prepare(self, lm: LanguageModel) -> float:
        """Compute the moments of keys, or read those that another run computed."""
        return self.moments(lm).seconds

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """The values of all facts, then the shifts layer by layer."""
        require_facts(facts)
        moments = self.moments(lm).by_layer
        places = Places(lm, self.config, self.settings.prefixes, self.settings.prefix_tokens)
        varied = [places.with_prefixes(fact) for fact in facts]
        plain = [variants[0] for variants in varied]
        block, budget = self.layers[-1].block, self.config.batch.token_budget
        before = hidden_at(lm, block, plain, budget)  # (facts, hidden)
        targets = before + find_values(lm, block, facts, varied, places, before, self.settings, budget)
        shifts: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            with edited(lm, shifts):
                keys = _mean_keys(lm, layer.name, varied, budget)
                rest = (targets - hidden_at(lm, block, plain, budget)) / (len(self.layers) - index)
            shifts[layer.name] = spread(keys, rest, moments[layer.name], self.settings.covariance_weight)
        with edited(lm, shifts):
            missed = targets - hidden_at(lm, block, plain, budget)
        wanted = (targets - before).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        return PlainEdit(finite(shifts), float((missed.norm(dim=-1) / wanted).mean()))

    def moments(self, lm: LanguageModel) -> KeyMoments:
        """C of each layer, computed once."""
        if self._moments is None:
            self._moments = key_moments(
                lm, self.layers, self._texts(), self.settings.corpus_tokens,
                token_budget=self.config.batch.token_budget, cache=Path(self.settings.cache_dir),
            )  # fmt: skip
        return self._moments

    def _texts(self) -> Iterable[str]:
        if self.settings.corpus is not None:
            return read_texts(Path(self.settings.corpus))
        records = training_records(self.config)(0)
        texts = [f"{fact.prompt} {fact.answer}" for record in records for fact in record.unrelated]
        return list(dict.fromkeys(texts)) or [record.edit.prompt for record in records]


def spread(keys: Tensor, residuals: Tensor, moment: Tensor, weight: float) -> Tensor:
    """S = R Kᵀ (w C + K Kᵀ)⁻¹ in float64; rows are facts: keys (facts, key), residuals (facts, value)."""
    keys, residuals = keys.double(), residuals.double()
    gram = weight * moment + keys.T @ keys
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):
        raise EditError(
            "the keys' second moment is singular: the corpus is too small for this layer; give more text "
            "(baselines.memit.corpus, baselines.memit.corpus_tokens)"
        )
    return torch.cholesky_solve(keys.T @ residuals, factor).T


def _mean_keys(lm: LanguageModel, layer: str, varied: Sequence[Sequence[Placed]], budget: int) -> Tensor:
    """u at the subject's last token: half of it with nothing before the prompt, half with random texts (facts, key)."""
    flat = [placed for variants in varied for placed in variants]
    keys = keys_at(lm, layer, flat, budget).unflatten(0, (len(varied), -1))
    return (keys[:, 0] + keys[:, 1:].mean(1)) / 2 if keys.shape[1] > 1 else keys[:, 0]


# --- δ of each fact: the move of its subject's hidden state that makes the answer probable ---------------


def find_values(
    lm: LanguageModel, block: int, facts: Sequence[Fact], varied: Sequence[Sequence[Placed]], places: Places,
    before: Tensor, settings: MemitConfig, token_budget: int,
) -> Tensor:  # fmt: skip
    """δ (facts, hidden), optimised fact by fact; `varied` holds each fact behind different texts, `before` is h."""
    deltas = torch.zeros_like(before)
    for part in _parts(varied, token_budget):
        essence = [places.of(Fact(f"{facts[index].subject} is a", "thing", facts[index].subject)) for index in part]
        deltas[part] = _optimise(lm, block, [varied[index] for index in part], essence, before[part], settings)
    return deltas


def _parts(varied: Sequence[Sequence[Placed]], token_budget: int) -> list[range]:
    """Ranges of facts that fit the budget with all their prefixes; at least one fact each."""
    longest = max(placed.encoded.length for variants in varied for placed in variants)
    at_once = max(1, token_budget // (len(varied[0]) * longest))
    return [range(first, min(first + at_once, len(varied))) for first in range(0, len(varied), at_once)]


def _optimise(
    lm: LanguageModel, block: int, varied: Sequence[Sequence[Placed]], essence: Sequence[Placed], before: Tensor,
    settings: MemitConfig,
) -> Tensor:  # fmt: skip
    flat = [placed for variants in varied for placed in variants]
    batch = _one_batch(lm, [placed.encoded for placed in flat])
    about = _one_batch(lm, [_last_only(placed.encoded) for placed in essence])
    with torch.no_grad():
        unedited = lm.log_probs(about)
    sizes = before.norm(dim=-1)
    deltas = torch.zeros_like(before, requires_grad=True)  # float32 at least, see hidden_at
    optimizer = torch.optim.Adam([deltas], lr=settings.lr)
    owners = torch.arange(len(varied), device=lm.device).repeat_interleave(len(varied[0]))  # the fact of each text
    text_of_token = batch.fact_of(batch.answer_mask)
    weights = 1 / (text_of_token.bincount()[text_of_token] * len(varied[0]))  # those of a fact's tokens sum to 1
    order = about.facts.argsort()  # rows of a batch are sorted by length; δ is by fact
    unfinished = torch.ones(len(before), dtype=torch.bool, device=before.device)  # (facts,)
    for _ in range(settings.steps):
        optimizer.zero_grad(set_to_none=True)
        log_probs = _log_probs(lm, block, batch, flat, deltas[owners[batch.facts]])
        right = log_probs.gather(1, batch.targets[:, None]).squeeze(1)
        moved = _log_probs(lm, block, about, essence, deltas[about.facts])
        drift = (moved.exp() * (moved - unedited)).sum(-1)  # KL(edited ‖ unedited)
        decay = (deltas.square().sum(-1) + 1e-12).sqrt() / sizes.square()
        nll = torch.zeros_like(decay).index_add(0, owners[text_of_token], -weights * right)
        losses = nll + settings.kl_coef * drift[order] + settings.weight_decay * decay
        losses.sum().backward()  # type: ignore[no-untyped-call]
        unfinished &= losses.detach() >= settings.enough
        if not bool(unfinished.any()):
            break
        before_step = deltas.detach().clone()
        optimizer.step()
        with torch.no_grad():  # back into the ball around h; a fact that is good enough keeps its δ
            deltas *= (settings.clamp * sizes / deltas.norm(dim=-1).clamp(min=1e-12)).clamp(max=1)[:, None]
            deltas[~unfinished] = before_step[~unfinished]
    return deltas.detach()


def _log_probs(lm: LanguageModel, block: int, batch: TokenBatch, placed: Sequence[Placed], deltas: Tensor) -> Tensor:
    """Those of the answers when each subject's hidden state is moved by its row of `deltas` (batch, hidden)."""
    with hooked([(block_of(lm, block), add_at(deltas, last_tokens(batch, placed)))]):
        return lm.log_probs(batch)


def _one_batch(lm: LanguageModel, encoded: Sequence[EncodedFact]) -> TokenBatch:
    (batch,) = make_batches(encoded, sys.maxsize, lm.pad_id)
    return batch.to(lm.device)


def _last_only(fact: EncodedFact) -> EncodedFact:
    """The prompt alone; only its last position counts."""
    return replace(fact, input_ids=fact.input_ids[: fact.first + 1], targets=[0])
