"""How a number was obtained. Shares of right answers differ by tens of points between ways of asking, decoding and
scoring, so a result states all three with each, and no table mixes them unawares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from malmen.metrics import BY_TOKENS, ENDED, EXACT, FOLLOWING, GENERATED, METRICS

FORMS = {"raw": "the raw prompt", "chat": "the prompt in the chat template"}
TEACHER_FORCED = "teacher-forced: the most probable token at each place, given the answer before it"
GREEDY = "free-running, greedy"


@dataclass(frozen=True)
class Protocol:
    """How a score was obtained."""

    prompt: str  # what the model reads
    decoding: str  # how its answer is obtained
    scorer: str  # what counts as right
    questions: int | None = None  # how many were asked, where that is not all there are

    def __str__(self) -> str:
        asked = "" if self.questions is None else f" ({self.questions} questions)"
        return f"{self.prompt}{asked}; {self.decoding}; {self.scorer}"


@dataclass(frozen=True)
class Measured:
    """What one yardstick shows: flat scores, and how each was obtained. A score and its `_before` share a protocol."""

    scores: dict[str, float | None]
    protocols: dict[str, Protocol]


DECODING = {BY_TOKENS: TEACHER_FORCED, EXACT: TEACHER_FORCED, GENERATED: GREEDY, ENDED: GREEDY}
SCORERS = {  # by what follows a metric's name
    BY_TOKENS: "share of answer tokens that are right",
    EXACT: "share of answers whose every token is right",
    GENERATED: "share of texts that begin with the answer's tokens",
    ENDED: "share of texts that begin with the answer's tokens and end after them",
}


def success_protocols(form: str) -> dict[str, Protocol]:
    """Of ES, GS and LS and of what follows from an edit, with facts in this form."""
    return {
        metric.name + way: Protocol(FORMS[form], decoding, SCORERS[way])
        for metric in (*METRICS, *FOLLOWING)
        for way, decoding in DECODING.items()
    }


def as_records(protocols: Mapping[str, Protocol]) -> dict[str, dict[str, Any]]:
    """For JSON, by name of the score."""
    return {
        name: {key: value for key, value in asdict(protocol).items() if value is not None}
        for name, protocol in protocols.items()
    }
