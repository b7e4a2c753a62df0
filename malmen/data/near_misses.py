"""Near misses: questions that resemble an edit but are not to change, the same words about another subject.

An editor that answers them with the edit's answer has learnt the wording of a question instead of the fact.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.data.subjects import find_frame
from malmen.data.tokens import EncodedFact


@dataclass(frozen=True)
class Question:
    """A question of the training records, which another record's edit may come near."""

    prompt: str
    wordings: frozenset[str]  # all prompts that ask for this fact
    subject: str | None = None
    frame: str | None = None  # the words around the subject

    @classmethod
    def of(cls, record: EditRecord) -> Question:
        """What a record's edit asks."""
        wordings = frozenset((record.edit.prompt, *(fact.prompt for fact in record.equivalents)))
        return cls(record.edit.prompt, wordings, *(find_frame(record) or ()))


def near_miss_questions(config: Config, records: Iterable[EditRecord]) -> list[Question]:
    """Different questions, drawn by the seed: those first whose frame others share, `own_text.texts` at most."""
    questions = list({record.edit.prompt: Question.of(record) for record in records}.values())
    frames: Counter[str | None] = Counter(question.frame for question in questions if question.frame)
    random.Random(f"near misses/{config.seed}").shuffle(questions)
    questions.sort(key=lambda question: frames[question.frame] < 2)
    return questions[: config.own_text.texts]


@dataclass(frozen=True)
class NearMisses:
    """Questions with what the unedited model answers."""

    answered: Sequence[tuple[Question, EncodedFact]] = ()

    def draw(
        self, records: Sequence[EditRecord], edited: Sequence[EditRecord], number: int, rng: random.Random
    ) -> list[EncodedFact]:
        """Near misses of these edits, `number` for each while there are enough, none of them twice.

        None is about a fact or a subject that one of `edited` edits, which are these and perhaps more. Edits whose
        frame has too few get other questions.
        """
        if not number or not self.answered:
            return []
        changed = [Question.of(record) for record in edited]
        touched = {prompt for question in changed for prompt in question.wordings}
        subjects = {question.subject for question in changed} - {None}
        free = [
            place
            for place, (question, _) in enumerate(self.answered)
            if question.subject not in subjects and question.wordings.isdisjoint(touched)
        ]
        rng.shuffle(free)
        alike: dict[str | None, list[int]] = {}
        for place in free:
            alike.setdefault(self.answered[place][0].frame, []).append(place)
        chosen = []
        for frame in (Question.of(record).frame for record in records):
            same_frame = alike.get(frame, []) if frame else []
            chosen += [same_frame.pop() for _ in range(min(number, len(same_frame)))]
        taken = set(chosen)
        others = (place for place in free if place not in taken)
        chosen += list(islice(others, number * len(records) - len(chosen)))
        return [self.answered[place][1] for place in chosen]
