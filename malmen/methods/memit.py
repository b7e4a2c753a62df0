"""MEMIT: a value for each fact at its subject's last token, spread over several layers (Meng et al., ICLR 2023).

For each fact, δ moves the hidden state h that the last edited block puts out at the subject's last token, so that the
answer becomes probable. Layer by layer, what is left of δ is shared among the layers still to come:
S = R Kᵀ (w C + K Kᵀ)⁻¹, with the keys K of the subjects, their residuals R, and the second moment C of all other keys.

With a history, K Kᵀ of the facts of earlier rounds joins the sum, so that the outputs of their keys stay, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmen.config import Config, MemitConfig
from malmen.data.records import Fact
from malmen.data.splits import training_records
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches, one_batch
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import finite, require_facts
from malmen.errors import EditError
from malmen.lm.hooks import hooked
from malmen.lm.key_moments import KeyMoments, key_moments, read_texts
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import edited
from malmen.lm.trace import rows_at


class Memit(UntrainedMethod):
    """Needs the model, text to estimate the keys' moments from, and the subjects of the facts."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        if lm.kind != "decoder":
            raise EditError(
                f"MEMIT's values are set at subjects' last tokens in decoders; this model is of kind {lm.kind}"
            )
        if len({parameter.device for parameter in lm.model.parameters()}) > 1:
            raise EditError(
                "MEMIT's values need the whole model on one device; model.device=split is for other methods"
            )
        self.config, self.settings = config, config.baselines.memit
        self._moments: KeyMoments | None = None
        self.history: dict[str, Tensor] | None = None  # K Kᵀ of earlier rounds by layer; None: edits keep no history
        self.layers = sorted(find_layers(lm.model, self.settings.layers, "second"), key=lambda layer: layer.block)

    def prepare(self, lm: LanguageModel) -> float:
        """Compute the moments of keys, or read those that another run computed."""
        return self.moments(lm).seconds

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """The values of all facts, then the shifts layer by layer."""
        require_facts(facts)
        self.prepare(lm)
        places = Places(lm, self.config, self.settings.prefixes, self.settings.prefix_tokens)
        varied = [places.with_prefixes(fact) for fact in facts]
        plain = [variants[0] for variants in varied]
        block, budget = self.layers[-1].block, self.config.batch.token_budget
        before = hidden_at(lm, block, plain, budget)  # (facts, hidden)
        targets = before + find_values(lm, block, facts, varied, places, before, self.settings, budget)
        shifts: dict[str, Tensor] = {}
        keys: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            with edited(lm, shifts):
                keys[layer.name] = _mean_keys(lm, layer.name, varied, budget)
                rest = (targets - hidden_at(lm, block, plain, budget)) / (len(self.layers) - index)
            shifts[layer.name] = self.layer_shift(lm, layer.name, keys[layer.name], rest)
        with edited(lm, shifts):
            missed = targets - hidden_at(lm, block, plain, budget)
        wanted = (targets - before).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        result = PlainEdit(finite(shifts), float((missed.norm(dim=-1) / wanted).mean()))
        if self.history is not None:  # of an edit that holds
            for name, rows in keys.items():
                gram = rows.double().T @ rows.double()
                self.history[name] = self.history[name] + gram if name in self.history else gram
        return result

    def layer_shift(self, lm: LanguageModel, layer: str, keys: Tensor, rest: Tensor) -> Tensor:
        """S of a layer (value, key) from the facts' keys (facts, key) and its share `rest` of what is left of δ (facts,
        value)."""
        moment, weight = self.moments(lm).by_layer[layer], self.settings.covariance_weight
        return spread(keys, rest, moment, weight, (self.history or {}).get(layer))

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


class MemitHistory(Memit):
    """MEMIT in rounds: each round also keeps the outputs of the keys of all facts that earlier rounds edited."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        super().__init__(lm, config)
        own = config.baselines.memit_history.model_dump(exclude_none=True)
        self.settings = self.settings.model_copy(update=own)

    def for_rounds(self) -> MemitHistory:
        """A copy with an empty history, which grows with each edit."""
        series = copy.copy(self)
        series.history = {}
        return series


def spread(keys: Tensor, residuals: Tensor, moment: Tensor, weight: float, history: Tensor | None = None) -> Tensor:
    """S = R Kᵀ (w C + H + K Kᵀ)⁻¹ in float64, with the history H of earlier keys (key, key); rows are facts: keys
    (facts, key), residuals (facts, value)."""
    keys, residuals = keys.double(), residuals.double()
    gram = weight * moment + keys.T @ keys
    if history is not None:
        gram += history
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
    keys = _captured(lm, lm.model.get_submodule(layer), flat, budget, of_input=True).unflatten(0, (len(varied), -1))
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
    batch = one_batch([placed.encoded for placed in flat], lm.pad_id).to(lm.device)
    prompts = [placed.encoded for placed in essence]  # alone; only their last positions count
    cut = [replace(fact, input_ids=fact.input_ids[: fact.first + 1], targets=[0]) for fact in prompts]
    about = one_batch(cut, lm.pad_id).to(lm.device)
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
    with hooked([(lm.blocks("decoder")[block], partial(add_at, deltas, last_tokens(batch, placed)))]):
        return lm.log_probs(batch)


# --- where a subject ends in the tokens, and the keys and hidden states there ------------------------------


@dataclass(frozen=True)
class Placed:
    """A fact in tokens, and the position of its subject's last token."""

    encoded: EncodedFact
    position: int


class Places:
    """Locates the subjects of facts, by themselves and behind a few random texts."""

    def __init__(self, lm: LanguageModel, config: Config, prefixes: int, prefix_tokens: int) -> None:
        self.lm, self.encoder = lm, fact_encoder(lm, config.data)
        if not getattr(lm.tokenizer, "is_fast", False):
            raise EditError("MEMIT's values need a fast tokenizer, which gives the place of each token in the text")
        self.prefixes = random_texts(lm, prefixes, prefix_tokens, config.seed)

    def of(self, fact: Fact, prefix: str = "") -> Placed:
        """A fact behind a prefix; EditError if it has no subject, or one that is not in its prompt."""
        if not fact.subject:
            raise EditError(
                f"MEMIT's values need the subject of {fact.prompt!r}: give the row a `subject`, or rephrasings "
                "that share it"
            )
        prompt = prefix + fact.prompt
        name = re.escape(fact.subject)  # as a word of its own, or anywhere: not every script separates words
        match = re.search(rf"(?<!\w){name}(?!\w)", fact.prompt) or re.search(name, fact.prompt)
        text, special = self.encoder.prompt_text(prompt)
        begin = text.find(prompt)  # a chat template may trim it
        if match is None or begin < 0:
            raise EditError(f"the subject {fact.subject!r} is not in the prompt {fact.prompt!r}")
        end = begin + len(prefix) + match.end()
        spans = self.lm.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)["offset_mapping"]
        position = max(index for index, (first, last) in enumerate(spans) if first < end and last > first)
        encoded = self.encoder.encode(Fact(prompt, fact.answer))
        if encoded.first + 1 != len(self.encoder.prompt_ids(prompt)):
            raise EditError(
                f"the prompt {fact.prompt[:60]!r} … is too long for MEMIT's values: truncated, it may lose its subject"
            )
        return Placed(encoded, position)

    def with_prefixes(self, fact: Fact) -> list[Placed]:
        """The fact by itself, then behind each random text."""
        return [self.of(fact), *(self.of(fact, prefix) for prefix in self.prefixes)]


@torch.no_grad()
def random_texts(lm: LanguageModel, number: int, tokens: int, seed: int) -> list[str]:
    """Texts that the model writes without a prompt, drawn token by token; each ends with a full stop and a space."""
    generator = torch.Generator().manual_seed(seed)
    begin = lm.tokenizer.bos_token_id if lm.tokenizer.bos_token_id is not None else lm.tokenizer.eos_token_id or 0
    texts = []
    for _ in range(number):
        ids = [int(begin)]
        for _ in range(tokens):
            logits = cast(Any, lm.model)(torch.tensor([ids], device=lm.device), use_cache=False).logits[0, -1]
            chances = logits.float().softmax(-1).cpu()
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        text = " ".join(str(lm.tokenizer.decode(ids[1:], skip_special_tokens=True)).split())
        texts.append(f"{text}. ")
    return texts


def hidden_at(lm: LanguageModel, block: int, placed: Sequence[Placed], token_budget: int) -> Tensor:
    """The output of a block at each subject's last token (facts, hidden)."""
    return _captured(lm, lm.blocks("decoder")[block], placed, token_budget, of_input=False)


@torch.no_grad()
def _captured(
    lm: LanguageModel, module: nn.Module, placed: Sequence[Placed], token_budget: int, *, of_input: bool
) -> Tensor:
    """The module's input or output at each subject's last token (facts, width), in float32 at least."""
    batches = make_batches([fact.encoded for fact in placed], token_budget, lm.pad_id)
    seen: list[Tensor] = []  # by batch

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        states = args[0] if of_input else output if isinstance(output, Tensor) else output[0]
        seen.append(rows_at(last_tokens(batches[len(seen)], placed), states))

    with hooked([(module, hook)]):
        for batch in batches:
            lm.logits(batch.to(lm.device))
    states = torch.cat(seen)[torch.cat([batch.facts for batch in batches]).argsort()]
    return states.to(torch.promote_types(states.dtype, torch.float32))  # differences of them are used


def last_tokens(batch: TokenBatch, placed: Sequence[Placed]) -> Tensor:
    """Which of a batch's tokens (facts, length) are the last ones of the subjects: one in each row."""
    positions = torch.tensor([placed[index].position for index in batch.facts.tolist()])
    return torch.arange(batch.answer_mask.shape[1]) == positions[:, None]


def add_at(rows: Tensor, places: Tensor, _module: nn.Module, _args: Any, output: Any) -> Any:
    """A hook, once it has `rows` and `places`: adds a row (batch, hidden) to a block's output at the one place (batch,
    length) of each row."""
    hidden = output if isinstance(output, Tensor) else output[0]
    changed = hidden + places[..., None].to(hidden.device) * rows[:, None].to(hidden.dtype)
    return changed if isinstance(output, Tensor) else (changed, *output[1:])
