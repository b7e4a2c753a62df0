"""The position of a subject's last token, and the model's keys and hidden states there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.errors import EditError
from malmen.lm.hooks import hooked
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.trace import rows_at


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
            raise EditError("MEMIT needs a fast tokenizer, which gives the place of each token in the text")
        self.prefixes = random_texts(lm, prefixes, prefix_tokens, config.seed)

    def of(self, fact: Fact, prefix: str = "") -> Placed:
        """A fact behind a prefix; EditError if it has no subject, or one that is not in its prompt."""
        if not fact.subject:
            raise EditError(
                f"MEMIT needs the subject of {fact.prompt!r}: give the row a `subject`, or rephrasings that share it"
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
                f"the prompt {fact.prompt[:60]!r} … is too long for MEMIT: truncated, it may lose its subject"
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


def keys_at(lm: LanguageModel, layer: str, placed: Sequence[Placed], token_budget: int) -> Tensor:
    """The layer's input at each subject's last token (facts, key)."""
    return _captured(lm, lm.model.get_submodule(layer), placed, token_budget, of_input=True)


def hidden_at(lm: LanguageModel, block: int, placed: Sequence[Placed], token_budget: int) -> Tensor:
    """The output of a block at each subject's last token (facts, hidden)."""
    return _captured(lm, block_of(lm, block), placed, token_budget, of_input=False)


def block_of(lm: LanguageModel, block: int) -> nn.Module:
    """The decoder block of this number."""
    return lm.model.get_submodule(f"{lm.stacks['decoder']}.{block}")


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


def add_at(rows: Tensor, places: Tensor) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that adds a row (batch, hidden) to a block's output at the one place (batch, length) of each row."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        changed = hidden + places[..., None].to(hidden.device) * rows[:, None].to(hidden.dtype)
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    return hook
