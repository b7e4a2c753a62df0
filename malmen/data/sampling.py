"""Which records a meta-training step uses.

The choice depends on the seed and the step's number alone, so any step can be drawn again: after a resume, on another
machine, in another order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from malmen.config import Config
from malmen.data.near_misses import NearMisses
from malmen.data.records import EditRecord, Fact, compatible_records, unrelated_to_all
from malmen.data.splits import check_encodable
from malmen.data.tokens import EncodedFact, FactEncoder, MetaBatch, PreservedKeys
from malmen.errors import EditError, UsageError
from malmen.runs.fact_cache import FactCache

Item = TypeVar("Item")
KINDS = ("edits", "equivalents", "unrelated")  # of a step's facts, as MetaBatch names them


def preserved_facts(config: Config, records: Iterable[EditRecord]) -> list[Fact]:
    """Distinct unrelated training facts, drawn by the seed, whose keys an edit is to leave alone."""
    facts = list(dict.fromkeys(fact for record in records for fact in record.unrelated))
    if not facts:
        raise EditError(
            f"{config.editor.preserving_words}, but the records of {config.data.train} "
            "have no unrelated facts whose keys could be preserved: add unrelated facts, or set it to 0"
        )
    random.Random(f"preserved/{config.seed}").shuffle(facts)
    return facts[: config.editor.preserved_facts]


def at_most(items: list[Item], limit: int | None, rng: random.Random) -> list[Item]:
    """All of them, or `limit` drawn from them, in their order. Without a limit nothing is drawn from `rng`."""
    if limit is None or len(items) <= limit:
        return items
    return [items[place] for place in sorted(rng.sample(range(len(items)), limit))]


def _share(limit: int | None, parts: int) -> int | None:
    """A limit's part, at least 1."""
    return None if limit is None else max(1, limit // parts)


def recurring_kinds(config: Config, num_records: int) -> tuple[str, ...]:
    """The kinds of facts that a run of so many training records draws again, on average, or another run does."""
    training, builtin = config.training, config.data.train == "builtin"
    if config.batch.cache_dir is not None:
        return KINDS
    low, high = training.min_edits or training.num_edits, training.num_edits
    edits = high if low >= high else (high - low) / math.log(high / low)  # per step, on average
    if training.steps * edits > num_records:
        return ("unrelated",) if builtin else KINDS  # every epoch edits the built-in world with new answers
    texts = training.unrelated_per_step or edits * training.unrelated_per_edit
    own = config.data.unrelated != "given" and training.steps * texts > config.own_text.texts
    return ("unrelated",) if own else ()


class OwnText(NamedTuple):
    """A text that the unedited model has written after a prompt."""

    prompt: str
    fact: EncodedFact


@dataclass
class Sampler:
    """Draws the meta-batch of any step; `records` gives the training records of an epoch."""

    config: Config
    encoder: FactEncoder
    records: Callable[[int], list[EditRecord]]
    own_texts: Sequence[OwnText] = ()  # what the unedited model writes, for `data.unrelated`
    near_misses: NearMisses = field(default_factory=NearMisses)  # what it answers to questions, for `data.near_misses`
    _epoch: tuple[int, list[EditRecord]] = (-1, [])

    def __post_init__(self) -> None:
        if self.config.training.locality_tokens == "all" and self.encoder.kind != "decoder":
            raise UsageError(
                f"training.locality_tokens=all is for decoders; this model is of kind {self.encoder.kind!r}, where the "
                "tokens of a prompt predict nothing: use `answer`"
            )
        self._encode: Callable[[Fact], EncodedFact] = cache(self.encoder.encode)
        self.steps_per_epoch = len(self.records(0)) // self.config.training.num_edits
        if self.steps_per_epoch == 0:
            raise EditError(
                f"training.num_edits is {self.config.training.num_edits}, but {self.config.data.train} has only "
                f"{len(self.records(0))} records"
            )

    def recurring(self) -> tuple[str, ...]:
        """The kinds of facts that return, in this run or another, so that caching them saves work."""
        return recurring_kinds(self.config, len(self.records(0)))

    def caches(self, base_model: str, dtype: torch.dtype) -> dict[str, FactCache]:
        """One cache, within the config's budget, by each kind of fact that recurs.

        Runs may share a folder: fingerprint and dtype keep the work of different models apart.
        """
        batch = self.config.batch
        kinds = self.recurring() if batch.cache_mb else ()
        if not kinds:
            return {}
        name = f"{base_model}-{str(dtype).removeprefix('torch.')}"
        folder = Path(batch.cache_dir) / name if batch.cache_dir is not None else None
        return dict.fromkeys(kinds, FactCache(batch.cache_mb * 2**20, folder))

    def check_lengths(self) -> None:
        """EditError for a training fact that the model cannot encode, before the first step."""
        check_encodable(self.encoder, self.records(0), self._encode)

    def batch(self, step: int) -> MetaBatch:
        """The facts of this step, encoded."""
        (whole,) = self.trajectory(step, 1)
        return whole

    def trajectory(self, step: int, length: int) -> list[MetaBatch]:
        """The facts of this step, its edits in `length` batches: what one of them is not to change, none of them
        edits."""
        training, seed = self.config.training, self.config.seed
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        records = compatible_records(order[place * training.num_edits :] + order, self._num_edits(step))
        draws = random.Random(f"step/{seed}/{step}"), random.Random(f"near misses/{seed}/{step}")
        parts = [records[first::length] for first in range(min(length, len(records)))]
        return [self._batch(part, records, len(parts), *draws) for part in parts]

    def _batch(
        self, records: Sequence[EditRecord], edited: Sequence[EditRecord], parts: int, rng: random.Random,
        near: random.Random,
    ) -> MetaBatch:  # fmt: skip
        """The facts of these records, of a step that edits them all in so many parts."""
        training, data = self.config.training, self.config.data
        equivalents = [fact for record in records for fact in self._equivalents(record, rng)]
        given = [] if data.unrelated == "self" else self._given(records, edited, rng)
        own = self._own(records, edited, rng)
        sources = [given, own, self.near_misses.draw(records, edited, data.near_misses, near)]
        limit = _share(training.unrelated_per_step, parts * max(1, sum(map(bool, sources))))  # as many of each source
        unrelated = [fact for source in sources for fact in at_most(source, limit, rng)]
        if training.locality_tokens == "all":
            unrelated = [fact.throughout() for fact in unrelated]
        return MetaBatch(
            [self._encode(record.edit) for record in records],
            [self._encode(fact) for fact in at_most(equivalents, _share(training.equivalents_per_step, parts), rng)],
            unrelated,
            [record.id for record in records],
        )

    def preserved(self) -> PreservedKeys:
        """What the keys that an edit is to leave alone are computed on."""
        terms, unrelated, phrasings = self.config.editor.preserved_terms, [], []
        if "unrelated" in terms:
            given = [] if self.config.data.unrelated == "self" else preserved_facts(self.config, self.records(0))
            unrelated = [*map(self._encode, given), *(text.fact for text in self.own_texts)]
        if "phrasing" in terms:
            phrasings = self._phrasings()
        return PreservedKeys(unrelated, phrasings)

    def _phrasings(self) -> list[tuple[EncodedFact, EncodedFact]]:
        """Training edits with one equivalent each, drawn by the seed."""
        if self.encoder.kind == "encoder-decoder":
            raise UsageError(
                "editor.phrasing_weight compares tokens that predict an answer, and an encoder has none: set it to 0"
            )
        rng, records = random.Random(f"phrasings/{self.config.seed}"), list(self.records(0))
        rng.shuffle(records)
        pairs: list[tuple[EncodedFact, EncodedFact]] = []
        for record in records:
            if len(pairs) == self.config.editor.preserved_facts:
                break
            if record.equivalents:
                edit, equivalent = self._encode(record.edit), self._encode(rng.choice(record.equivalents))
                length = min(len(edit.targets), len(equivalent.targets))  # one of them may have an end mark
                if edit.targets[:length] == equivalent.targets[:length]:
                    pairs.append((edit.shortened(length), equivalent.shortened(length)))
        if not pairs:
            raise EditError(
                f"editor.phrasing_weight is {self.config.editor.phrasing_weight:g}, but no record of "
                f"{self.config.data.train} has an equivalent with the answer of its edit: add some, or set it to 0"
            )
        return pairs

    def _given(
        self, records: Sequence[EditRecord], edited: Sequence[EditRecord], rng: random.Random
    ) -> list[EncodedFact]:
        per_edit = self.config.training.unrelated_per_edit
        return [
            self._encode(fact)
            for facts in unrelated_to_all(records, edited)
            for fact in rng.sample(facts, min(per_edit, len(facts)))
        ]

    def _own(
        self, records: Sequence[EditRecord], edited: Sequence[EditRecord], rng: random.Random
    ) -> list[EncodedFact]:
        """Texts after prompts that are not edited, as many as of given facts."""
        if not self.own_texts:
            return []
        touched = {fact.prompt for record in edited for fact in (record.edit, *record.equivalents)}
        texts = [text.fact for text in self.own_texts if text.prompt not in touched]
        return rng.sample(texts, min(self.config.training.unrelated_per_edit * len(records), len(texts)))

    def _num_edits(self, step: int) -> int:
        """m of this step, log-uniform: as often between 16 and 32 as between 128 and 256."""
        training = self.config.training
        if training.min_edits is None or training.min_edits >= training.num_edits:
            return training.num_edits
        low, high = math.log(training.min_edits), math.log(training.num_edits)
        return round(math.exp(random.Random(f"edits/{self.config.seed}/{step}").uniform(low, high)))

    def _equivalents(self, record: EditRecord, rng: random.Random) -> list[Fact]:
        training = self.config.training
        pool = list(record.equivalents) or [record.edit]
        sampled = rng.sample(pool, min(training.equivalents_per_edit, len(pool)))
        return [record.edit, *sampled] if training.include_edit and record.equivalents else sampled

    def _order(self, epoch: int) -> list[EditRecord]:
        if self._epoch[0] != epoch:
            records = list(self.records(epoch))
            random.Random(f"epoch/{self.config.seed}/{epoch}").shuffle(records)
            self._epoch = (epoch, records)
        return self._epoch[1]
