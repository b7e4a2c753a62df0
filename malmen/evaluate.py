"""How well an edit holds (ES), carries over (GS) and leaves the rest alone (LS): §3, and what users ask beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord, Fact, FactKind, facts_by_kind
from malmen.data.tokens import EncodedFact, FactEncoder, TokenBatch, make_batches
from malmen.edit_method import Rewrite
from malmen.lm.generate import OnProgress, decode, generate_ids, part_of, up_to_the_end
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Shifts, edited
from malmen.lm.own_text import evaluation_texts, rewritten_texts
from malmen.measure.drift import Drift, drift_of_edit, drift_of_rounding
from malmen.measure.neighbours import measure_neighbours
from malmen.measure.protocol import Measured, Protocol, success_protocols
from malmen.metrics import BEFORE, BY_TOKENS, ENDED, EXACT, FLOOR, FOLLOWING, GENERATED, METRICS

OWN_TEXTS = 48  # in each form of prompts, where nothing else is said
_END_MARKS = ("\n", ".", ",", ";", ":", "!", "?")

Predict = Callable[[Sequence[EncodedFact]], list[list[int]]]  # the most probable tokens of each fact's answer


@dataclass(frozen=True)
class Success:
    """Shares of right answers; None where nothing was measured."""

    tokens: float | None  # token-wise, teacher-forced: the paper's ES, GS, LS
    exact: float | None  # whole answers, teacher-forced
    generated: float | None  # whole answers, free-running; as decoding is greedy, the same answers as `exact`
    ended: float | None  # of these, the answers after which the text ends


@dataclass(frozen=True)
class FactReport:
    """One fact before and after."""

    role: FactKind
    prompt: str
    answer: str
    right_before: bool
    right_after: bool
    before: str | None = None  # generated text
    after: str | None = None
    forced_before: str = ""  # the most probable token at each place, given the answer before it
    forced_after: str = ""


@dataclass
class Evaluation:
    """One set of edits, measured."""

    edits: int
    before: dict[FactKind, Success]
    after: dict[FactKind, Success]
    locality_agreement: float | None  # unrelated answer tokens predicted as by the unedited model
    generated_agreement: float | None  # unrelated prompts whose whole generated text is the unedited model's
    mean_residual: float | None
    shift_ratio: dict[str, float]  # ‖S‖/‖W‖ by layer
    drift: dict[str, Drift] = field(default_factory=dict)  # along its own texts, by form of the prompts
    floor: dict[str, Drift] = field(default_factory=dict)  # the same of the unedited model, rounded to bfloat16
    facts: list[FactReport] = field(default_factory=list)
    prompt_form: Literal["raw", "chat"] = "raw"  # of ES, GS and LS
    measured: list[Measured] = field(default_factory=list)  # by other yardsticks

    def scores(self) -> dict[str, Any]:
        """Flat numbers for tables, files and trackers."""
        flat: dict[str, Any] = {"edits": self.edits}
        for suffix, table in (("", self.after), (BEFORE, self.before)):
            for metric in (*METRICS, *(metric for metric in FOLLOWING if metric.kind in table)):
                for way, share in zip((BY_TOKENS, EXACT, GENERATED, ENDED), astuple(table[metric.kind]), strict=True):
                    flat[metric.name + way + suffix] = share
        flat["locality_agreement"] = self.locality_agreement
        flat["locality_agreement_generated"] = self.generated_agreement
        flat["mean_residual"] = self.mean_residual
        flat["max_shift_ratio"] = max(self.shift_ratio.values(), default=0.0)
        for suffix, drifts in (("", self.drift), (FLOOR, self.floor)):
            for form, drift in drifts.items():
                flat |= {f"own_{form}_{name}{suffix}": value for name, value in vars(drift).items()}
        for yardstick in self.measured:
            flat |= yardstick.scores
        return flat

    def protocols(self) -> dict[str, Protocol]:
        """How shares of right answers were obtained, by name of the score, of those that were."""
        scores, all_protocols = self.scores(), success_protocols(self.prompt_form)
        for yardstick in self.measured:
            all_protocols |= yardstick.protocols
        return {name: protocol for name, protocol in all_protocols.items() if scores.get(name) is not None}


class _Question(NamedTuple):
    """A fact that both models are asked for."""

    kind: FactKind
    fact: Fact
    encoded: EncodedFact
    max_new_tokens: int  # of the generated answer


class _Answer(NamedTuple):
    """One model's answer to a question."""

    predicted: list[int]  # teacher-forced, one token for each answer token
    generated: list[int] | None  # free-running


def evaluate(
    lm: LanguageModel, records: Sequence[EditRecord], shifts: Shifts, config: Config, *,
    generate: bool = True, own_texts: int = 0, residual: float | None = None, rewrite: Rewrite | None = None,
    predict: Predict | None = None, on_progress: OnProgress | None = None,
) -> Evaluation:  # fmt: skip
    """Measure an edit of these records' facts, beside the unedited model; also along so many of its own texts in each
    form of prompts.

    `rewrite` says what the edited model reads in place of each prompt. `predict` replaces `predict_tokens`.
    `on_progress` counts answers: each fact is asked before and after the edit, teacher-forced and, with `generate`,
    free-running. The end mark is no part of the answers that are counted.
    """
    data = config.data.model_copy(update={"append_eos": False}) if lm.kind == "decoder" else config.data
    encoder, budget = fact_encoder(lm, data), config.batch.token_budget
    questions = _questions(encoder, records)
    generate = generate and lm.kind != "classifier"
    along = 0 if lm.kind == "classifier" else own_texts
    passes = (4 if generate else 2) + (3 if along else 0)

    def answers(questions: Sequence[_Question], first_pass: int) -> list[_Answer]:
        on_predicted, on_generated = (part_of(on_progress, first_pass + number, passes) for number in range(2))
        encoded = [asked.encoded for asked in questions]
        predicted = predict(encoded) if predict else predict_tokens(lm, encoded, budget, on_predicted)
        if not generate:
            return [_Answer(ids, None) for ids in predicted]
        prompts, limits = [asked.fact.prompt for asked in questions], [asked.max_new_tokens for asked in questions]
        generated = generate_ids(lm, encoder, prompts, limits, budget, on_generated)
        return [_Answer(*ids) for ids in zip(predicted, generated, strict=True)]

    before = answers(questions, 0)
    with edited(lm, shifts):
        after = answers([_rewritten(encoder, asked, rewrite) for asked in questions], 2 if generate else 1)
    drift, floor = _drifts(lm, records, shifts, rewrite, config, along, part_of(on_progress, passes - 3, passes))
    asked_and_answered = list(zip(questions, before, after, strict=True))
    unrelated = [(old, new) for asked, old, new in asked_and_answered if asked.kind == "unrelated"]
    return Evaluation(
        edits=len(records),
        before=_successes(lm, questions, before),
        after=_successes(lm, questions, after),
        locality_agreement=_mean(
            old_token == new_token
            for old, new in unrelated
            for old_token, new_token in zip(old.predicted, new.predicted, strict=True)
        ),
        generated_agreement=_mean(
            up_to_the_end(lm, old.generated) == up_to_the_end(lm, new.generated)
            for old, new in unrelated
            if old.generated is not None and new.generated is not None
        ),
        mean_residual=residual,
        shift_ratio=shift_ratio(lm, shifts),
        drift=drift,
        floor=floor,
        facts=[_report(lm, *of_fact) for of_fact in asked_and_answered],
        prompt_form=config.data.prompt_format,
        measured=measure_neighbours(lm, records, shifts, config, rewrite=rewrite) if generate else [],
    )


def _drifts(
    lm: LanguageModel, records: Sequence[EditRecord], shifts: Shifts, rewrite: Rewrite | None, config: Config,
    number: int, on_progress: OnProgress | None,
) -> tuple[dict[str, Drift], dict[str, Drift]]:  # fmt: skip
    """Drift and floor by form of prompts, along so many texts in each."""
    if not number:
        return {}, {}
    texts = evaluation_texts(lm, config, records, number, on_progress)
    budget = config.batch.token_budget
    read = rewritten_texts(lm, config, records, texts, rewrite) if rewrite else {}
    floor = {form: drift_of_rounding(lm, written, budget) for form, written in texts.items()}
    return (
        {form: drift_of_edit(lm, written, shifts, budget, read=read.get(form)) for form, written in texts.items()},
        {form: drift for form, drift in floor.items() if drift is not None},
    )


def shift_ratio(lm: LanguageModel, shifts: Shifts) -> dict[str, float]:
    """‖S‖/‖W‖ by layer."""
    return {name: float(shift.norm()) / lm.weight_norm(name) for name, shift in shifts.items()}


def predict_tokens(
    lm: LanguageModel, facts: Sequence[EncodedFact], token_budget: int, on_progress: OnProgress | None = None
) -> list[list[int]]:
    """The most probable token at each answer position, given the answer before it. `on_progress` counts facts."""
    return predict_batches(lm, len(facts), make_batches(facts, token_budget, lm.pad_id), on_progress)


@torch.no_grad()
def predict_batches(
    lm: LanguageModel, num_facts: int, batches: Sequence[TokenBatch], on_progress: OnProgress | None = None
) -> list[list[int]]:
    """The same for facts that are already in batches."""
    predicted: list[list[int]] = [[] for _ in range(num_facts)]
    done = 0
    for batch in batches:
        batch = batch.to(lm.device)
        best: Tensor = lm.logits(batch).argmax(-1)
        if not batch.counts:
            continue
        for fact, token in zip(batch.fact_of(batch.answer_mask).tolist(), best.tolist(), strict=True):
            predicted[fact].append(token)
        done += len(batch.facts)
        if on_progress:
            on_progress(done, num_facts)
    return predicted


def _questions(encoder: FactEncoder, records: Sequence[EditRecord]) -> list[_Question]:
    questions = []
    for kind, listed in facts_by_kind(records).items():
        encoded = [encoder.encode(fact) for fact in listed]
        longest = max((len(fact.targets) for fact in encoded), default=0) + 1  # one more, to see whether the text ends
        for fact, tokens in zip(listed, encoded, strict=True):
            # As many new tokens for all, so that people can compare; where a prompt leaves less room, as many as its
            # own answer has.
            room = encoder.max_length - tokens.first if encoder.kind == "decoder" else longest
            questions.append(_Question(kind, fact, tokens, max(len(tokens.targets), min(longest, room))))
    return questions


def _rewritten(encoder: FactEncoder, asked: _Question, rewrite: Rewrite | None) -> _Question:
    """The question as the edited model reads it; the answer's tokens are the same."""
    if rewrite is None:
        return asked
    fact = replace(asked.fact, prompt=rewrite(asked.fact.prompt))
    encoded = encoder.encode(fact)
    assert encoded.targets == asked.encoded.targets, f"{fact.prompt!r} does not end as {asked.fact.prompt!r} does"
    room = encoder.max_length - encoded.first if encoder.kind == "decoder" else asked.max_new_tokens
    return _Question(asked.kind, fact, encoded, max(len(encoded.targets), min(asked.max_new_tokens, room)))


def _successes(
    lm: LanguageModel, questions: Sequence[_Question], answers: Sequence[_Answer]
) -> dict[FactKind, Success]:
    successes: dict[FactKind, Success] = {}
    for metric in (*METRICS, *FOLLOWING):
        answered = [
            (asked.encoded, answer)
            for asked, answer in zip(questions, answers, strict=True)
            if asked.kind == metric.kind
        ]
        if metric in FOLLOWING and not answered:
            continue
        hits = [
            [token == target for token, target in zip(answer.predicted, fact.targets, strict=True)]
            for fact, answer in answered
        ]
        generated = [(fact, answer.generated) for fact, answer in answered if answer.generated is not None]
        successes[metric.kind] = Success(
            tokens=_mean(hit for row in hits for hit in row),
            exact=_mean(all(row) for row in hits),
            generated=_mean(ids[: len(fact.targets)] == fact.targets for fact, ids in generated),
            ended=_mean(_ends(lm, ids, fact) for fact, ids in generated),
        )
    return successes


def _ends(lm: LanguageModel, ids: list[int], fact: EncodedFact) -> bool:
    """Whether the text is the answer and ends after it: by the end mark, a new line, or a mark that closes a clause.

    An answer that takes all the room there is has not been seen to end.
    """
    answer, rest = ids[: len(fact.targets)], ids[len(fact.targets) :]
    if answer != fact.targets:
        return False
    if lm.tokenizer.eos_token_id in (answer[-1], *rest[:1]):
        return True
    return str(lm.tokenizer.decode(rest)).lstrip(" ")[:1] in _END_MARKS if rest else False


def _mean(values: Iterable[bool]) -> float | None:
    """The share of what holds; None of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _report(lm: LanguageModel, asked: _Question, before: _Answer, after: _Answer) -> FactReport:
    targets = asked.encoded.targets
    return FactReport(
        role=asked.kind,
        prompt=asked.fact.prompt,
        answer=asked.fact.answer,
        right_before=before.predicted == targets,
        right_after=after.predicted == targets,
        before=None if before.generated is None else decode(lm, before.generated),
        after=None if after.generated is None else decode(lm, after.generated),
        forced_before=_text(lm, before.predicted),
        forced_after=_text(lm, after.predicted),
    )


def _text(lm: LanguageModel, ids: list[int]) -> str:
    if lm.kind != "classifier":
        return decode(lm, ids)
    labels = getattr(lm.model.config, "id2label", {})
    return " ".join(str(labels.get(label, label)) for label in ids)
