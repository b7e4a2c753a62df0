"""How well an edit holds (ES), carries over (GS) and leaves the rest alone (LS): §3, and what users ask beyond it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord, Fact, unrelated_to_all
from malmen.data.tokens import EncodedFact, FactEncoder, TokenBatch, make_batches
from malmen.lm.generate import decode, generate_ids, up_to_the_end
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Shifts, edited

_END_MARKS = ("\n", ".", ",", ";", ":", "!", "?")

Predict = Callable[[Sequence[EncodedFact]], list[list[int]]]  # the most probable tokens of each fact's answer


@dataclass
class Answers:
    """What a model says to some facts' prompts."""

    predicted: list[list[int]]  # teacher-forced, one token for each answer token
    generated: list[list[int]] | None  # free-running


@dataclass
class Success:
    """Shares of right answers; None where nothing was measured."""

    tokens: float | None  # token-wise, teacher-forced: the paper's ES, GS, LS
    exact: float | None  # whole answers, teacher-forced
    generated: float | None  # whole answers, free-running; as decoding is greedy, the same answers as `exact`
    ended: float | None  # of these, the answers after which the text ends


@dataclass
class FactReport:
    """One fact before and after."""

    role: str  # edit, equivalent or unrelated
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
    before: dict[str, Success]
    after: dict[str, Success]
    locality_agreement: float | None  # unrelated answer tokens predicted as by the unedited model
    generated_agreement: float | None  # unrelated prompts whose whole generated text is the unedited model's
    mean_residual: float | None
    shift_ratio: dict[str, float]  # ‖S‖/‖W‖ by layer
    facts: list[FactReport] = field(default_factory=list)

    def scores(self) -> dict[str, Any]:
        """Flat numbers for tables, files and trackers."""
        names = {"edit": "edit_success", "equivalent": "generalization_success", "unrelated": "locality_success"}
        flat: dict[str, Any] = {"edits": self.edits}
        for suffix, table in (("", self.after), ("_before", self.before)):
            for role, name in names.items():
                flat[name + suffix] = table[role].tokens
                flat[f"{name}_exact{suffix}"] = table[role].exact
                flat[f"{name}_generated{suffix}"] = table[role].generated
                flat[f"{name}_ended{suffix}"] = table[role].ended
        flat["locality_agreement"] = self.locality_agreement
        flat["locality_agreement_generated"] = self.generated_agreement
        flat["mean_residual"] = self.mean_residual
        flat["max_shift_ratio"] = max(self.shift_ratio.values(), default=0.0)
        return flat


def evaluate(
    lm: LanguageModel, records: Sequence[EditRecord], shifts: Shifts, config: Config, *,
    generate: bool = True, residual: float | None = None, predict: Predict | None = None,
) -> Evaluation:  # fmt: skip
    """Measure an edit of these records' facts, beside the unedited model. `predict` is this module's by default."""
    predict = predict or (lambda facts: predict_tokens(lm, facts, config.batch.token_budget))
    encoder = fact_encoder(lm, config.data)
    facts: dict[str, list[Fact]] = {
        "edit": [record.edit for record in records],
        "equivalent": [fact for record in records for fact in record.equivalents],
        "unrelated": [fact for some in unrelated_to_all(records) for fact in some],
    }
    encoded = {role: [encoder.encode(fact) for fact in some] for role, some in facts.items()}
    tables: dict[str, dict[str, Answers]] = {}
    for when, context in (("before", nullcontext()), ("after", edited(lm, shifts))):
        with context:
            tables[when] = {
                role: _answers(lm, encoder, facts[role], encoded[role], config, generate, predict) for role in facts
            }
    old, new = (tables[when]["unrelated"] for when in ("before", "after"))
    return Evaluation(
        edits=len(records),
        before={role: _success(lm, encoded[role], answers) for role, answers in tables["before"].items()},
        after={role: _success(lm, encoded[role], answers) for role, answers in tables["after"].items()},
        locality_agreement=_agreement(old.predicted, new.predicted),
        generated_agreement=_generated_agreement(lm, old.generated, new.generated),
        mean_residual=residual,
        shift_ratio=shift_ratio(lm, shifts),
        facts=_reports(lm, facts, encoded, tables),
    )


def shift_ratio(lm: LanguageModel, shifts: Shifts) -> dict[str, float]:
    """‖S‖/‖W‖ by layer."""
    return {name: float(shift.norm()) / lm.weight_norm(name) for name, shift in shifts.items()}


def predict_tokens(lm: LanguageModel, facts: Sequence[EncodedFact], token_budget: int) -> list[list[int]]:
    """The most probable token at each answer position, given the answer before it."""
    return predict_batches(lm, len(facts), make_batches(facts, token_budget, lm.pad_id))


@torch.no_grad()
def predict_batches(lm: LanguageModel, num_facts: int, batches: Sequence[TokenBatch]) -> list[list[int]]:
    """The same for facts that are already in batches."""
    found: list[list[int]] = [[] for _ in range(num_facts)]
    for batch in batches:
        batch = batch.to(lm.device)
        best: Tensor = lm.logits(batch).argmax(-1)
        if not batch.counts:
            continue
        for fact, token in zip(batch.fact_of(batch.answer_mask).tolist(), best.tolist(), strict=True):
            found[fact].append(token)
    return found


def _answers(
    lm: LanguageModel, encoder: FactEncoder, facts: Sequence[Fact], encoded: Sequence[EncodedFact],
    config: Config, generate: bool, predict: Predict,
) -> Answers:  # fmt: skip
    predicted = predict(encoded)
    if not generate or lm.kind == "classifier" or not encoded:
        return Answers(predicted, None)
    longest = max(len(fact.targets) for fact in encoded) + 1  # one more, to see whether the text ends there
    news = [_new_tokens(fact, longest, encoder) for fact in encoded]
    prompts = [fact.prompt for fact in facts]
    return Answers(predicted, generate_ids(lm, encoder, prompts, news, config.batch.token_budget))


def _new_tokens(fact: EncodedFact, longest: int, encoder: FactEncoder) -> int:
    """As many for all, so that people can compare; where a prompt leaves less room, as many as its own answer has."""
    if encoder.kind != "decoder":
        return longest
    return max(len(fact.targets), min(longest, encoder.max_length - fact.first))


def _success(lm: LanguageModel, encoded: Sequence[EncodedFact], answers: Answers) -> Success:
    if not encoded:
        return Success(None, None, None, None)
    hits = [
        [token == target for token, target in zip(predicted, fact.targets, strict=True)]
        for fact, predicted in zip(encoded, answers.predicted, strict=True)
    ]
    generated = ended = None
    if answers.generated is not None:
        pairs = list(zip(answers.generated, encoded, strict=True))
        generated = _mean(_starts(ids, fact) for ids, fact in pairs)
        ended = _mean(_starts(ids, fact) and _ends(lm, ids, fact) for ids, fact in pairs)
    return Success(_mean(hit for row in hits for hit in row), _mean(all(row) for row in hits), generated, ended)


def _starts(ids: list[int], fact: EncodedFact) -> bool:
    return ids[: len(fact.targets)] == fact.targets


def _ends(lm: LanguageModel, ids: list[int], fact: EncodedFact) -> bool:
    """Whether the text ends after the answer: by the end mark, a new line, or what closes a clause or a sentence.
    An answer that takes all the room there is has not been seen to end."""
    answer, rest = ids[: len(fact.targets)], ids[len(fact.targets) :]
    if lm.tokenizer.eos_token_id in (answer[-1], *rest[:1]):
        return True
    return str(lm.tokenizer.decode(rest)).lstrip(" ")[:1] in _END_MARKS if rest else False


def _mean(values: Any) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed)


def _agreement(before: list[list[int]], after: list[list[int]]) -> float | None:
    pairs = [pair for rows in zip(before, after, strict=True) for pair in zip(*rows, strict=True)]
    return _mean(one == other for one, other in pairs) if pairs else None


def _generated_agreement(
    lm: LanguageModel, before: list[list[int]] | None, after: list[list[int]] | None
) -> float | None:
    if not before or not after:
        return None
    return _mean(up_to_the_end(lm, one) == up_to_the_end(lm, other) for one, other in zip(before, after, strict=True))


def _text(lm: LanguageModel, ids: list[int]) -> str:
    if lm.kind != "classifier":
        return decode(lm, ids)
    names = getattr(lm.model.config, "id2label", {})
    return " ".join(str(names.get(one, one)) for one in ids)


def _reports(
    lm: LanguageModel,
    facts: dict[str, list[Fact]],
    encoded: dict[str, list[EncodedFact]],
    tables: dict[str, dict[str, Answers]],
) -> list[FactReport]:
    reports = []
    for role, some in facts.items():
        before, after = tables["before"][role], tables["after"][role]
        for index, fact in enumerate(some):
            targets = encoded[role][index].targets
            forced = before.predicted[index], after.predicted[index]
            report = FactReport(role, fact.prompt, fact.answer, forced[0] == targets, forced[1] == targets)
            report.forced_before, report.forced_after = (_text(lm, ids) for ids in forced)
            if before.generated is not None and after.generated is not None:
                report.before, report.after = decode(lm, before.generated[index]), decode(lm, after.generated[index])
            reports.append(report)
    return reports
