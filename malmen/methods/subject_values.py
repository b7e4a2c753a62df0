"""δ of each fact: the move of its subject's hidden state that makes the answer probable."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from malmen.config import MemitConfig
from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.lm.hooks import hooked
from malmen.lm.model import LanguageModel
from malmen.methods.subject_tokens import Placed, Places, add_at, block_of, positions_in


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


def _parts(varied: Sequence[Sequence[Placed]], token_budget: int) -> Iterator[range]:
    """Ranges of facts that fit the budget with all their prefixes; at least one fact each."""
    first = 0
    while first < len(varied):
        stop, longest = first, 0
        while stop < len(varied):
            longest = max(longest, *(placed.encoded.length for placed in varied[stop]))
            if stop > first and (stop + 1 - first) * len(varied[stop]) * longest > token_budget:
                break
            stop += 1
        yield range(first, stop)
        first = stop


def _optimise(
    lm: LanguageModel, block: int, varied: Sequence[Sequence[Placed]], essence: Sequence[Placed], before: Tensor,
    settings: MemitConfig,
) -> Tensor:  # fmt: skip
    flat = [placed for variants in varied for placed in variants]
    owners = torch.tensor([index for index, variants in enumerate(varied) for _ in variants])
    batch = _one_batch(lm, [placed.encoded for placed in flat])
    about = _one_batch(lm, [_last_only(placed) for placed in essence])
    kept = _log_probs(lm, block, about, essence, None).detach()
    sizes = before.norm(dim=-1)
    deltas = torch.zeros_like(before, requires_grad=True)  # float32 at least, see hidden_at
    optimizer = torch.optim.Adam([deltas], lr=settings.lr)
    rows = owners[batch.facts.cpu()]
    weights = _weights(batch, flat, owners, varied).to(lm.device)
    owner_of_token = owners.to(lm.device)[batch.fact_of(batch.answer_mask)]
    order = about.facts.argsort()  # rows of a batch are sorted by length; δ is by fact
    unfinished = torch.ones(len(before), dtype=torch.bool, device=before.device)  # (facts,)
    for _ in range(settings.steps):
        optimizer.zero_grad(set_to_none=True)
        log_probs = _log_probs(lm, block, batch, flat, deltas[rows])
        right = log_probs.gather(1, batch.targets[:, None]).squeeze(1)
        moved = _log_probs(lm, block, about, essence, deltas[about.facts.cpu()])
        drift = (moved.exp() * (moved - kept)).sum(-1)  # KL(edited ‖ unedited)
        decay = (deltas.square().sum(-1) + 1e-12).sqrt() / sizes.square()
        nll = torch.zeros_like(decay).index_add(0, owner_of_token, -weights * right)
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


def _weights(batch: TokenBatch, flat: Sequence[Placed], owners: Tensor, varied: Sequence[Sequence[Placed]]) -> Tensor:
    """The weight of each answer token: those of a fact, over all its prefixes, sum to 1."""
    rows = batch.fact_of(batch.answer_mask).tolist()
    return torch.tensor([1 / (len(flat[row].encoded.targets) * len(varied[int(owners[row])])) for row in rows])


def _log_probs(
    lm: LanguageModel, block: int, batch: TokenBatch, placed: Sequence[Placed], deltas: Tensor | None
) -> Tensor:
    if deltas is None:
        with torch.no_grad():
            return lm.log_probs(batch)
    with hooked([(block_of(lm, block), add_at(deltas, positions_in(batch, placed)))]):
        return lm.log_probs(batch)


def _one_batch(lm: LanguageModel, encoded: Sequence[EncodedFact]) -> TokenBatch:
    (batch,) = make_batches(encoded, sys.maxsize, lm.pad_id)
    return batch.to(lm.device)


def _last_only(placed: Placed) -> EncodedFact:
    """The prompt alone; only its last position counts."""
    prompt = placed.encoded.input_ids[: placed.encoded.first + 1]
    return EncodedFact(prompt, len(prompt) - 1, [0])
