"""Retrieval: no weight changes; the fact nearest to a question is put before it, and the unedited model answers.

This is what a practitioner does instead of editing. Near is the cosine of two prompts' words. A word weighs
ln((1 + N) / (1 + n)) + 1 if n of the training data's N prompts have it, so names decide, and one fact is searched like
thousands. Nothing is trained, and no other model is needed.
"""

from __future__ import annotations

import math
import re
import string
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from malmen.config import Config, RetrievalConfig
from malmen.data.records import Fact
from malmen.data.splits import training_records
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import require_facts
from malmen.errors import EditError, UsageError
from malmen.lm.model import LanguageModel


class Retrieval(UntrainedMethod):
    """Needs a model that writes, and prompts to count words in."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        if lm.kind == "classifier":
            raise EditError("retrieval needs a model that reads a fact and writes its answer; this one is a classifier")
        check_template(config.baselines.retrieval.template)
        self.config, self.settings = config, config.baselines.retrieval
        self._words: WordCounts | None = None
        self._seconds = 0.0

    def prepare(self, lm: LanguageModel) -> float:
        """Count the words of the training data's prompts."""
        self.words()
        return self._seconds

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """No shifts, but an index that puts facts before prompts."""
        require_facts(facts)
        return PlainEdit({}, rewrite=Index(facts, self.words(), self.settings))

    def words(self) -> WordCounts:
        """The counts, made once."""
        if self._words is None:
            began = time.perf_counter()
            records = training_records(self.config)(0)
            facts = (fact for record in records for fact in (record.edit, *record.equivalents, *record.unrelated))
            self._words = WordCounts({fact.prompt for fact in facts})
            self._seconds = time.perf_counter() - began
        return self._words


class WordCounts:
    """In how many of some prompts each word is."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self.prompts, self.having = 0, Counter[str]()
        for prompt in prompts:
            self.prompts += 1
            self.having.update(set(words_of(prompt)))

    def direction(self, prompt: str) -> dict[str, float]:
        """The prompt's words with their weights, of length 1; empty without words."""
        weights = {
            word: number * (math.log((1 + self.prompts) / (1 + self.having[word])) + 1)
            for word, number in Counter(words_of(prompt)).items()
        }
        length = math.sqrt(sum(weight**2 for weight in weights.values()))
        return {word: weight / length for word, weight in weights.items()}


class Index:
    """Facts by the words of their prompts; called with a prompt, it returns what the model reads in its place."""

    def __init__(self, facts: Iterable[Fact], words: WordCounts, settings: RetrievalConfig) -> None:
        self.facts = list({fact.prompt: fact for fact in facts}.values())
        self.words, self.settings = words, settings
        self.places: dict[str, list[tuple[int, float]]] = {}  # of each word: the facts that have it, and its weight
        for place, fact in enumerate(self.facts):
            for word, weight in words.direction(fact.prompt).items():
                self.places.setdefault(word, []).append((place, weight))

    def nearest(self, prompt: str) -> tuple[Fact, float] | None:
        """The fact whose prompt is most similar, and its similarity in (0, 1]; None if no fact shares a word."""
        similar: dict[int, float] = {}
        for word, weight in self.words.direction(prompt).items():
            for place, other in self.places.get(word, ()):
                similar[place] = similar.get(place, 0.0) + weight * other
        if not similar:
            return None
        rounded = {place: round(value, 12) for place, value in similar.items()}  # the same words: 1, and ties are ties
        best = min(rounded, key=lambda place: (-rounded[place], place))
        return self.facts[best], rounded[best]

    def __call__(self, prompt: str) -> str:
        """The prompt behind its nearest fact, or by itself where none is near enough."""
        nearest = self.nearest(prompt)
        if nearest is None:
            return prompt
        fact, similarity = nearest
        if similarity < self.settings.threshold:
            return prompt
        return self.settings.template.format(fact=fact.prompt, answer=fact.answer, prompt=prompt)


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, without case."""
    return re.findall(r"\w+", text.casefold())


def check_template(template: str) -> None:
    """UsageError unless it has the three fields once each, and the prompt at its end, where the answer follows."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError:
        fields = []
    if sorted(fields) != ["answer", "fact", "prompt"] or not template.endswith("{prompt}"):
        raise UsageError(
            f"baselines.retrieval.template is {template!r}: expected {{fact}} and {{answer}}, and {{prompt}} at its end"
        )
