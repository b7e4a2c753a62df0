"""From facts to token batches, for each kind of language model.

A fact becomes the model's inputs, the positions whose output predicts the answer, and the answer's tokens. Losses,
traces and metrics see only those three.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from malmen.data.records import Fact
from malmen.errors import EditError

log = logging.getLogger(__name__)

Kind = Literal["decoder", "encoder-decoder", "classifier"]
Turn = tuple[str, str]  # of a chat: what the user wrote, and the model's answer
_ROLES = ("user", "assistant")
CLASSES = ("REFUTES", "SUPPORTS")  # a classifier's answers, by index
_FREE_PADDING = 64  # padded tokens of a micro-batch that cost no more than another micro-batch would
_PADDING_SHARE = 0.05  # of its tokens, which may be padded beside them


@dataclass(frozen=True)
class EncodedFact:
    """One fact in tokens; position p of the answered sequence predicts targets[p - first]."""

    input_ids: list[int]  # the sequence the answer is read from: decoder inputs, or BERT's
    first: int  # the first position that predicts an answer token
    targets: list[int]
    encoder_ids: list[int] | None = None  # the prompt of an encoder-decoder

    @property
    def length(self) -> int:
        """Tokens the model runs for it."""
        return len(self.input_ids) + len(self.encoder_ids or ())

    def throughout(self) -> EncodedFact:
        """The same text of a decoder as if all of it were the answer: every token predicts the next."""
        assert self.encoder_ids is None
        return EncodedFact(self.input_ids, 0, [*self.input_ids[1:], self.targets[-1]])

    def shortened(self, length: int) -> EncodedFact:
        """A decoder's text up to so many tokens of the answer."""
        cut = len(self.targets) - length
        return replace(self, input_ids=self.input_ids[: len(self.input_ids) - cut], targets=self.targets[:length])

    def num_traced(self, stack: str, tokens: str) -> int:
        """The number of its tokens that are traced in a stack, see TokenBatch.traced_mask."""
        if stack != "decoder":
            return len(self.encoder_ids or ())
        return len(self.input_ids) if tokens == "all" else len(self.targets)


@dataclass(frozen=True)
class MetaBatch:
    """The facts of one meta-training step; `record_ids` name its records in errors."""

    edits: Sequence[EncodedFact]
    equivalents: Sequence[EncodedFact]
    unrelated: Sequence[EncodedFact]
    record_ids: Sequence[str] = ()


@dataclass(frozen=True)
class PreservedKeys:
    """What `editor.preserved_weight` and `editor.phrasing_weight` are about."""

    unrelated: Sequence[EncodedFact] = ()  # facts and texts whose keys are to be left alone
    phrasings: Sequence[tuple[EncodedFact, EncodedFact]] = ()  # an edit and one of its equivalents, with one answer


@dataclass(frozen=True)
class TokenBatch:
    """Padded facts. Answers are listed fact by fact: the n-th True of `answer_mask` has `targets[n]`."""

    inputs: dict[str, Tensor]
    answer_mask: Tensor  # (facts, length) bool
    targets: Tensor  # (answer tokens,)
    facts: Tensor  # (facts,): each row's index in the list that was batched
    masks: dict[str, Tensor]  # real (not padded) tokens of each stack, (facts, length) bool
    counts: bool = True  # False: run only in step with other processes; the result is dropped

    def traced_mask(self, stack: str, tokens: str) -> Tensor:
        """The tokens whose keys and value gradients are used (§5: those that output the answer).

        In an encoder-decoder no encoder token outputs an answer: all tokens of the prompt are used.
        """
        if tokens == "all" or stack != "decoder":
            return self.masks[stack]
        return self.answer_mask

    def fact_of(self, mask: Tensor) -> Tensor:
        """The fact's index for each True of a mask (facts, length)."""
        return self.facts[:, None].expand_as(mask)[mask]

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on another device."""
        return TokenBatch(
            {name: tensor.to(device) for name, tensor in self.inputs.items()},
            self.answer_mask.to(device),
            self.targets.to(device),
            self.facts.to(device),
            {name: tensor.to(device) for name, tensor in self.masks.items()},
            self.counts,
        )


@dataclass
class FactEncoder:
    """Encodes facts with one tokenizer; counts those that it had to truncate."""

    tokenizer: Any
    kind: Kind
    prompt_format: Literal["raw", "chat", "verbatim"] = "raw"  # verbatim: the prompt already has its template
    max_length: int = 512
    overlong: Literal["error", "truncate"] = "error"
    append_eos: Literal["auto"] | bool | None = None  # None: only where the kind needs it to know where an answer ends
    decoder_start: int = 0
    truncated: int = 0

    def encode(self, fact: Fact) -> EncodedFact:
        """The fact in tokens; EditError if it cannot be encoded."""
        if not fact.answer.strip() or not fact.prompt.strip():
            raise EditError(
                f"a fact needs a prompt and an answer; given prompt {fact.prompt!r}, answer {fact.answer!r}"
            )
        encoded = {
            "decoder": self._decoder,
            "encoder-decoder": self._encoder_decoder,
            "classifier": self._classifier,
        }[self.kind](fact)
        longest = max(len(encoded.input_ids), len(encoded.encoder_ids or ()))
        return encoded if longest <= self.max_length else self._shorten(fact, encoded)

    def generation_ids(self, prompt: str, max_new_tokens: int, earlier: Sequence[Turn] = ()) -> list[int]:
        """The prompt to generate from, cut so that it leaves room for the answer."""
        if not prompt.strip():
            raise EditError("cannot answer an empty prompt")
        ids = self.prompt_ids(prompt, earlier)
        room = self.max_length - (max_new_tokens - 1 if self.kind == "decoder" else 0)  # the last one is not read
        if len(ids) <= room:
            return ids
        if self.overlong == "error" or room < 2:
            raise EditError(
                f"the prompt {prompt[:60]!r} … has {len(ids)} tokens; with {max_new_tokens} new ones that is more than "
                f"the {self.max_length} that fit; shorten it, or set data.overlong to `truncate`"
            )
        self._count_truncation(prompt, room)
        return self._cut(ids, room)

    def prompt_ids(self, prompt: str, earlier: Sequence[Turn] = ()) -> list[int]:
        """The prompt alone, as the model reads it before it answers."""
        text, special = self.prompt_text(prompt, earlier)
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        if self.kind == "decoder" and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # some tokenizers end every text, which would end the prompt before the answer
        return ids

    def prompt_text(self, prompt: str, earlier: Sequence[Turn] = ()) -> tuple[str, bool]:
        """The prompt in its template, and whether the tokenizer is to add its special tokens. Only a chat template has
        `earlier` turns."""
        if self.prompt_format != "chat":
            assert not earlier, f"{len(earlier)} earlier turns in the form {self.prompt_format}"
            return prompt, self.prompt_format == "raw"
        if not getattr(self.tokenizer, "chat_template", None):
            raise EditError("prompt_format is `chat`, but this model's tokenizer has no chat template; use `raw`")
        said = [{"role": role, "content": text} for turn in earlier for role, text in zip(_ROLES, turn, strict=True)]
        turns = [*said, {"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return text, False  # the template writes its own BOS

    def answered(self, prompt_ids: Sequence[int], targets: Sequence[int]) -> EncodedFact:
        """These tokens of an answer behind those of a prompt."""
        assert self.kind != "classifier", "a classifier's answer is no text"
        if self.kind == "encoder-decoder":
            return EncodedFact([self.decoder_start, *targets[:-1]], 0, list(targets), list(prompt_ids))
        return EncodedFact([*prompt_ids, *targets[:-1]], len(prompt_ids) - 1, list(targets))

    def _decoder(self, fact: Fact) -> EncodedFact:
        prompt = self.prompt_ids(fact.prompt)
        text, special = self.prompt_text(fact.prompt)
        spaced = self.prompt_format == "chat" or text[-1:].isspace()
        answer_text = fact.answer if spaced else f" {fact.answer}"
        both = list(self.tokenizer(text + answer_text, add_special_tokens=special)["input_ids"])
        if special and len(both) > 1 and both[-1] == self.tokenizer.eos_token_id:
            both.pop()
        if both[: len(prompt)] == prompt and len(both) > len(prompt):
            answer = both[len(prompt) :]
        else:  # a token spans both: the answer is tokenised by itself
            answer = list(self.tokenizer(answer_text, add_special_tokens=False)["input_ids"])
        if self._ends(fact):
            answer = [*answer, self.tokenizer.eos_token_id]
        if not prompt:  # nothing to predict the first answer token from
            raise EditError(f"the prompt {fact.prompt!r} has no tokens")
        return EncodedFact(prompt + answer[:-1], len(prompt) - 1, answer)

    def _ends(self, fact: Fact) -> bool:
        """Whether the end mark is part of a decoder's answer. What is not a question may go on after it."""
        if self.append_eos != "auto":
            return bool(self.append_eos)
        question = self.prompt_format == "chat" or fact.prompt.rstrip().endswith(("?", "？"))
        return question and self.tokenizer.eos_token_id is not None

    def _encoder_decoder(self, fact: Fact) -> EncodedFact:
        answer = list(self.tokenizer(text_target=fact.answer, add_special_tokens=False)["input_ids"])
        if self.append_eos is not False:
            answer.append(self.tokenizer.eos_token_id)
        return EncodedFact([self.decoder_start, *answer[:-1]], 0, answer, self.prompt_ids(fact.prompt))

    def _classifier(self, fact: Fact) -> EncodedFact:
        if fact.answer not in CLASSES:
            raise EditError(f"a classifier's answer is one of {', '.join(CLASSES)}; given {fact.answer!r}")
        return EncodedFact(self.prompt_ids(fact.prompt), 0, [CLASSES.index(fact.answer)])

    def _shorten(self, fact: Fact, encoded: EncodedFact) -> EncodedFact:
        if self.overlong == "error":
            raise EditError(
                f"the fact {fact.prompt[:60]!r} … has {encoded.length} tokens, more than max_length {self.max_length}; "
                "shorten it, raise data.max_length, or set data.overlong to `truncate`"
            )
        keep = self.max_length
        if encoded.first + len(encoded.targets) > keep and len(encoded.targets) >= keep:
            raise EditError(f"the answer of {fact.prompt[:60]!r} … alone is longer than max_length {keep}")
        self._count_truncation(fact.prompt, keep)
        if encoded.encoder_ids is not None:
            return replace(encoded, encoder_ids=self._cut(encoded.encoder_ids, keep))
        dropped = len(encoded.input_ids) - keep if self.kind == "decoder" else 0
        return replace(encoded, input_ids=self._cut(encoded.input_ids, keep), first=encoded.first - dropped)

    def _cut(self, ids: list[int], keep: int) -> list[int]:
        """Of a decoder's prompt, cut the start but no BOS, because the answer follows its end; of others the end."""
        if self.kind != "decoder":
            return [*ids[: keep - 1], ids[-1]]  # the end mark stays
        start = ids[:1] if ids[0] == self.tokenizer.bos_token_id and keep > 1 else []
        return [*start, *ids[len(ids) - keep + len(start) :]]

    def _count_truncation(self, prompt: str, keep: int) -> None:
        self.truncated += 1
        log.warning("truncated a prompt of %d characters to %d tokens (%d so far)", len(prompt), keep, self.truncated)


def make_batches(facts: Sequence[EncodedFact], token_budget: int, pad_id: int) -> list[TokenBatch]:
    """Micro-batches of similar lengths whose padded size stays within the budget (one fact always fits). One that
    would be padded by more than a batch of its own costs is cut."""
    sizes = [(len(fact.encoder_ids or ()), len(fact.input_ids)) for fact in facts]
    groups: list[list[int]] = []
    widest, tokens = (0, 0), 0  # of the last group
    for index in sorted(range(len(facts)), key=lambda index: sizes[index]):
        wider = (max(widest[0], sizes[index][0]), max(widest[1], sizes[index][1]))
        more = tokens + sum(sizes[index])
        padded = (len(groups[-1]) + 1) * sum(wider) if groups else 0
        if groups and padded <= token_budget and padded - more <= _FREE_PADDING + _PADDING_SHARE * more:
            groups[-1].append(index)
            widest, tokens = wider, more
        else:
            groups.append([index])
            widest, tokens = sizes[index], sum(sizes[index])
    return [_pad(facts, group, pad_id) for group in groups]


def one_batch(facts: Sequence[EncodedFact], pad_id: int) -> TokenBatch:
    """All facts in one batch, in their order, whatever the padding."""
    return _pad(facts, list(range(len(facts))), pad_id)


def _pad(facts: Sequence[EncodedFact], group: list[int], pad_id: int) -> TokenBatch:
    members = [facts[index] for index in group]
    input_ids, mask = _pad_ids([fact.input_ids for fact in members], pad_id)
    answer_mask = torch.zeros_like(mask)
    for row, fact in enumerate(members):
        answer_mask[row, fact.first : fact.first + len(fact.targets)] = True
    targets = torch.tensor([target for fact in members for target in fact.targets])
    inputs, masks = {"input_ids": input_ids, "attention_mask": mask.long()}, {"decoder": mask}
    if members[0].encoder_ids is not None:
        encoder_ids, encoder_mask = _pad_ids([fact.encoder_ids or [] for fact in members], pad_id)
        inputs = {"input_ids": encoder_ids, "attention_mask": encoder_mask.long(), "decoder_input_ids": input_ids}
        masks = {"encoder": encoder_mask, "decoder": mask}
    return TokenBatch(inputs, answer_mask, targets, torch.tensor(group), masks)


def _pad_ids(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return ids, mask
