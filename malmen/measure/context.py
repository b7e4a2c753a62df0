"""Whether edits hold behind other text: in use, a question rarely stands alone.

Each edited question is asked again behind a neutral sentence and behind one that gives the old answer, which tempts the
model to repeat it. Both are the unedited model's own words, so no corpus is needed. In a chat template they are an
earlier turn.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Literal, NamedTuple

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, FactEncoder, Turn
from malmen.edit_method import Rewrite
from malmen.errors import EditError
from malmen.evaluate import predict_tokens
from malmen.lm.generate import OnProgress, continue_prompts, decode, part_of
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Shifts, edited
from malmen.lm.own_text import Form, find_forms, openings
from malmen.measure.answer_text import contains, first_sentence
from malmen.measure.protocol import DECODING, FORMS, SCORERS, Measured, Protocol
from malmen.metrics import BEFORE, BY_TOKENS, EXACT, GENERATED, METRICS

Context = Literal["none", "neutral", "old_answer"]
CONTEXTS: dict[Context, str] = {
    "none": "",
    "neutral": " behind a neutral {} in the unedited model's words",
    "old_answer": " behind a {} with the unedited model's answer",
}
_PAUSES = string.punctuation + string.whitespace
_STANDING: dict[Form, str] = {"raw": "sentence", "chat": "turn"}


class Question(NamedTuple):
    """A fact to ask for, and what stands before it."""

    fact: Fact
    behind: Turn | None  # a sentence in two parts, which in a chat are the user's and the model's


def edits_in_context(
    lm: LanguageModel, edits: Sequence[Fact], shifts: Shifts, config: Config, *,
    rewrite: Rewrite | None = None, generate: bool = True, on_progress: OnProgress | None = None,
) -> Measured:  # fmt: skip
    """ES in each form of prompts and each context, before and after the edit.

    Of a form, all contexts have the same questions: those whose old answer says something else than the new one.
    `rewrite` is the edited model's, see `evaluate`. `on_progress` counts answers.
    """
    if lm.kind == "classifier":
        raise EditError("a classifier writes no text, so there is no context to ask its facts in")
    forms = find_forms(lm, config.own_text)
    place, parts = count(), 2 * len(CONTEXTS) * len(forms)
    measured = Measured({}, {})
    for form in forms:
        encoder = _encoder(lm, config, form)
        asked = questions_in_context(lm, encoder, edits, config)
        for context, questions in asked.items():
            for suffix in (BEFORE, ""):
                texts = _encoded(encoder, questions, None if suffix else rewrite)
                with nullcontext() if suffix else edited(lm, shifts):
                    shares = _shares(lm, texts, config, generate, part_of(on_progress, next(place), parts))
                for way, share in shares.items():
                    name = score_name(form, context, way)
                    measured.scores[name + suffix] = share
                    reads = FORMS[form] + CONTEXTS[context].format(_STANDING[form])
                    measured.protocols[name] = Protocol(reads, DECODING[way], SCORERS[way], len(questions))
    return measured


def score_name(form: Form, context: Context, way: str) -> str:
    """Such as `edit_success_in_context_raw_old_answer_exact`."""
    return f"{METRICS[0].name}_in_context_{form}_{context}{way}"


def questions_in_context(
    lm: LanguageModel, encoder: FactEncoder, edits: Sequence[Fact], config: Config
) -> dict[Context, list[Question]]:
    """The same questions in each context; a seed gives the same ones. The model is the unedited one."""
    old = own_words(lm, encoder, [fact.prompt for fact in edits], config)
    kept = [(fact, text) for fact, text in zip(edits, old, strict=True) if text and not contains(text, fact.answer)]
    rng = random.Random(f"context/{config.seed}")
    drawn = [rng.choice(openings()) for _ in kept]
    starts = sorted(set(drawn))
    neutral = dict(zip(starts, own_words(lm, encoder, starts, config), strict=True))
    return {
        "none": [Question(fact, None) for fact, _ in kept],
        "neutral": [
            Question(fact, (opening, neutral[opening])) for (fact, _), opening in zip(kept, drawn, strict=True)
        ],
        "old_answer": [Question(fact, (fact.prompt, text)) for fact, text in kept],
    }


def own_words(lm: LanguageModel, encoder: FactEncoder, prompts: Sequence[str], config: Config) -> list[str]:
    """The first sentence that the model writes after each prompt. Where it would say nothing it must; empty if all of
    that is punctuation."""
    number = config.own_text.max_tokens
    encoded = [encoder.generation_ids(prompt, number) for prompt in prompts]

    def write(ids: Sequence[list[int]], must_say: bool) -> Iterator[str]:
        rows = continue_prompts(lm, ids, [number] * len(ids), config.batch.token_budget, must_say=must_say)
        return (first_sentence(decode(lm, row).lstrip(_PAUSES)) for row in rows)

    texts = list(write(encoded, False))
    silent = [index for index, text in enumerate(texts) if not text]
    for index, text in zip(silent, write([encoded[index] for index in silent], True), strict=True):
        texts[index] = text
    return texts


def _encoder(lm: LanguageModel, config: Config, form: Form) -> FactEncoder:
    """Without an end mark, which is not counted; where a context leaves no room, its start is cut."""
    data = config.data.model_copy(update={"prompt_format": form, "overlong": "truncate"})
    return fact_encoder(lm, data.model_copy(update={"append_eos": False}) if lm.kind == "decoder" else data)


def _encoded(encoder: FactEncoder, questions: Sequence[Question], rewrite: Rewrite | None) -> list[EncodedFact]:
    """The questions as the model reads them; the answer has the tokens that it has without a context."""
    encoded = []
    for fact, behind in questions:
        targets, text = encoder.encode(fact).targets, fact.prompt
        if behind is not None and encoder.prompt_format != "chat":
            text, behind = f"{_sentence(behind)} {text}", None
        text = rewrite(text) if rewrite else text
        ids = encoder.generation_ids(text, len(targets), [behind] if behind else [])
        encoded.append(encoder.answered(ids, targets))
    return encoded


def _sentence(parts: Turn) -> str:
    """Both parts as one sentence."""
    text = f"{parts[0].rstrip()} {parts[1]}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _shares(
    lm: LanguageModel, facts: Sequence[EncodedFact], config: Config, generate: bool, on_progress: OnProgress | None
) -> dict[str, float | None]:
    """Shares of right answers by way of counting; None where no question is left."""
    if not facts:
        return dict.fromkeys((BY_TOKENS, EXACT, GENERATED) if generate else (BY_TOKENS, EXACT))
    budget, parts = config.batch.token_budget, 2 if generate else 1
    predicted = predict_tokens(lm, facts, budget, part_of(on_progress, 0, parts))
    hits = [
        [a == b for a, b in zip(ids, fact.targets, strict=True)] for ids, fact in zip(predicted, facts, strict=True)
    ]
    shares: dict[str, float | None] = {
        BY_TOKENS: sum(map(sum, hits)) / sum(map(len, hits)),
        EXACT: sum(map(all, hits)) / len(hits),
    }
    if generate:
        prompts = [fact.encoder_ids or fact.input_ids[: fact.first + 1] for fact in facts]
        limits = [len(fact.targets) for fact in facts]
        rows = continue_prompts(lm, prompts, limits, budget, part_of(on_progress, 1, parts))
        right = [row[: len(fact.targets)] == fact.targets for row, fact in zip(rows, facts, strict=True)]
        shares[GENERATED] = sum(right) / len(right)
    return shares
