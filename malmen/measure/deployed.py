"""Answers as a user of the deployed model gets them: in the chat template where there is one, freely generated, cut
where a reader stops, and compared as texts.

Teacher-forced scores show the model the answer that it is to give, and token by token comparison knows one spelling.
Neither is what a user sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from malmen.config import Config
from malmen.data.records import EditRecord, Fact, facts_by_kind
from malmen.data.tokens import FactEncoder
from malmen.edit_method import Rewrite
from malmen.errors import EditError
from malmen.lm.generate import OnProgress, continue_prompts, decode, part_of
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Shifts, edited
from malmen.lm.own_text import Form
from malmen.measure.answer_text import contains, first_sentence, plain_words, says_exactly
from malmen.measure.protocol import FORMS, GREEDY, Measured, Protocol
from malmen.metrics import BEFORE, DEPLOYED_CONTAINED, DEPLOYED_EXACT, FOLLOWING, METRICS

_TOKENS = 32  # of an answer, at most, where none that is given is longer
_SCORERS = {DEPLOYED_EXACT: says_exactly, DEPLOYED_CONTAINED: contains}
_CUT = "cut at the end mark, a new line or the full stop of a sentence"
_NORMALISED = "without case, articles, punctuation and white space around words"
SCORERS = {
    DEPLOYED_EXACT: f"share of texts that are the answer, {_NORMALISED}",
    DEPLOYED_CONTAINED: f"share of texts that contain the answer's words one behind the other, {_NORMALISED}",
}
AGREEMENT = "locality_agreement_deployed"


class Answers(NamedTuple):
    """What one model says to some facts."""

    facts: list[Fact]
    before: list[str]
    after: list[str]


def deployed_form(lm: LanguageModel) -> Form:
    """The form in which a deployed model is asked."""
    return "chat" if getattr(lm.tokenizer, "chat_template", None) else "raw"


def measure_deployed(
    lm: LanguageModel, records: Sequence[EditRecord], shifts: Shifts, config: Config, *,
    rewrite: Rewrite | None = None, on_progress: OnProgress | None = None,
) -> Measured:  # fmt: skip
    """ES, GS and LS (and of what follows from the edit) of deployed answers, before and after the edit, and how many
    unrelated answers stay.

    `rewrite` is the edited model's, see `evaluate`. `on_progress` counts answers.
    """
    if lm.kind == "classifier":
        raise EditError("a classifier writes no text, so there are no deployed answers to compare")
    by_kind = facts_by_kind(records)
    groups = {metric: by_kind[metric.kind] for metric in METRICS}
    groups |= {metric: by_kind[metric.kind] for metric in FOLLOWING if by_kind[metric.kind]}
    facts = [fact for group in groups.values() for fact in group]
    tokens = answer_tokens(lm, facts, config)
    said = [deployed_answers(lm, facts, config, tokens, None, part_of(on_progress, 0, 2))]
    with edited(lm, shifts):
        said.append(deployed_answers(lm, facts, config, tokens, rewrite, part_of(on_progress, 1, 2)))
    decoding = f"{GREEDY}, at most {tokens} tokens, {_CUT}"
    measured, place = Measured({}, {}), 0
    for metric, group in groups.items():
        answers = Answers(group, *(texts[place : place + len(group)] for texts in said))
        place += len(group)
        for way, is_right in _SCORERS.items():
            measured.protocols[metric.name + way] = Protocol(FORMS[deployed_form(lm)], decoding, SCORERS[way])
            for suffix, texts in ((BEFORE, answers.before), ("", answers.after)):
                right = (is_right(text, fact.answer) for text, fact in zip(texts, group, strict=True))
                measured.scores[metric.name + way + suffix] = _share(right)
        if metric.kind == "unrelated":
            same = zip(map(plain_words, answers.before), map(plain_words, answers.after), strict=True)
            measured.scores[AGREEMENT] = _share(old == new for old, new in same)
            scorer = f"share of unrelated texts that are the unedited model's, {_NORMALISED}"
            measured.protocols[AGREEMENT] = Protocol(FORMS[deployed_form(lm)], decoding, scorer)
    return measured


def answer_tokens(lm: LanguageModel, facts: Iterable[Fact], config: Config) -> int:
    """How many tokens an answer may have: more than any that is given, so that it is seen to end."""
    encoder = _encoder(lm, config)
    return max([_TOKENS, *(len(encoder.encode(fact).targets) + 1 for fact in facts)])


def deployed_answers(
    lm: LanguageModel, facts: Sequence[Fact], config: Config, tokens: int, rewrite: Rewrite | None = None,
    on_progress: OnProgress | None = None,
) -> list[str]:  # fmt: skip
    """What the model says to the facts' prompts in so many tokens, or as many as the prompt leaves room for."""
    encoder, prompts, limits = _encoder(lm, config), [], []
    for fact in facts:
        own = len(encoder.encode(fact).targets)  # a longer prompt is cut
        text = rewrite(fact.prompt) if rewrite else fact.prompt
        room = encoder.max_length + 1 - len(encoder.prompt_ids(text)) if encoder.kind == "decoder" else tokens
        limits.append(max(own, min(tokens, room)))
        prompts.append(encoder.generation_ids(text, limits[-1]))
    rows = continue_prompts(lm, prompts, limits, config.batch.token_budget, on_progress)
    return [first_sentence(decode(lm, row)) for row in rows]


def _encoder(lm: LanguageModel, config: Config) -> FactEncoder:
    update = {"prompt_format": deployed_form(lm), "overlong": "truncate"}
    return fact_encoder(lm, config.data.model_copy(update=update))


def _share(values: Iterable[bool]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
