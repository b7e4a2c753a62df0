"""The δ of each fact: what its subject's hidden state must be moved by, for the answer to become probable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from malmen.config import MemitConfig
from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.lm.model import LanguageModel
from malmen.methods.subject_tokens import Placed, Places, add_at, block_of, positions_in


def find_values(
    lm: LanguageModel, block: int, facts: Sequence[Fact], varied: Sequence[Sequence[Placed]], places: Places,
    before: Tensor, settings: MemitConfig, token_budget: int, on_facts: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """δ (facts, hidden), each by itself; `varied` are the facts behind different texts, `before` is h."""
    found = torch.zeros_like(before)
    for some in _parts(varied, token_budget):
        essence = [places.of(Fact(f"{facts[index].subject} is a", "thing", facts[index].subject)) for index in some]
        found[some] = _optimise(lm, block, [varied[index] for index in some], essence, before[some], settings)
        if on_facts:
            on_facts(some.stop)
    return found


def _parts(varied: Sequence[Sequence[Placed]], token_budget: int) -> Iterator[range]:
    """Facts that fit the budget together with all their prefixes; at least one."""
    first = 0
    while first < len(varied):
        stop, longest = first, 0
        while stop < len(varied):
            longest = max(longest, *(one.encoded.length for one in varied[stop]))
            if stop > first and (stop + 1 - first) * len(varied[stop]) * longest > token_budget:
                break
            stop += 1
        yield range(first, stop)
        first = stop


def _optimise(
    lm: LanguageModel, block: int, varied: Sequence[Sequence[Placed]], essence: Sequence[Placed], before: Tensor,
    settings: MemitConfig,
) -> Tensor:  # fmt: skip
    flat = [one for some in varied for one in some]
    owners = torch.tensor([index for index, some in enumerate(varied) for _ in some])
    (batch,) = _one_batch(lm, [one.encoded for one in flat])
    (about,) = _one_batch(lm, [_last_only(one) for one in essence])
    kept = _log_probs(lm, block, about, essence, None).detach()
    sizes = before.norm(dim=-1)
    deltas = torch.zeros_like(before, requires_grad=True)  # float32 at least, see hidden_at
    optimizer = torch.optim.Adam([deltas], lr=settings.lr)
    rows = owners[batch.facts.cpu()]
    weights = _weights(batch, flat, owners, varied).to(lm.device)
    owner_of_token = owners.to(lm.device)[batch.fact_of(batch.answer_mask)]
    order = about.facts.argsort()  # rows of a batch are sorted by length; δ is by fact
    open_ = torch.ones(len(before), dtype=torch.bool, device=before.device)  # facts whose answer is not probable yet
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
        open_ &= losses.detach() >= settings.enough
        if not bool(open_.any()):
            break
        before_step = deltas.detach().clone()
        optimizer.step()
        with torch.no_grad():  # back into the ball around h; what is good enough stays where it is
            deltas *= (settings.clamp * sizes / deltas.norm(dim=-1).clamp(min=1e-12)).clamp(max=1)[:, None]
            deltas[~open_] = before_step[~open_]
    return deltas.detach()


def _weights(batch: TokenBatch, flat: Sequence[Placed], owners: Tensor, varied: Sequence[Sequence[Placed]]) -> Tensor:
    """Of each answer token: one fact's tokens, over all its prefixes, have the weight 1 together."""
    places = batch.fact_of(batch.answer_mask).tolist()
    return torch.tensor([1 / (len(flat[at].encoded.targets) * len(varied[int(owners[at])])) for at in places])


def _log_probs(
    lm: LanguageModel, block: int, batch: TokenBatch, placed: Sequence[Placed], deltas: Tensor | None
) -> Tensor:
    if deltas is None:
        with torch.no_grad():
            return lm.log_probs(batch)
    handle = block_of(lm, block).register_forward_hook(add_at(deltas, positions_in(batch, placed)))
    try:
        return lm.log_probs(batch)
    finally:
        handle.remove()


def _one_batch(lm: LanguageModel, encoded: Sequence[EncodedFact]) -> list[TokenBatch]:
    return [batch.to(lm.device) for batch in make_batches(encoded, 10**12, lm.pad_id)]


def _last_only(one: Placed) -> EncodedFact:
    """The prompt alone, of which the last position counts."""
    prompt = one.encoded.input_ids[: one.encoded.first + 1]
    return EncodedFact(prompt, len(prompt) - 1, [0])
