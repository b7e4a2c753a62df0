"""Which records a meta-training step uses. It depends on the seed and the step's number alone, so any step
can be drawn again: after a resume, on another machine, in another order."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import EncodedFact, FactEncoder, MetaBatch
from malmen.data.world import world_records
from malmen.data.world_model import WORLD_MODEL
from malmen.errors import EditError, UsageError
from malmen.runs.fact_cache import FactCache

log = logging.getLogger(__name__)

ROLES = ("edits", "equivalents", "unrelated")


def training_records(config: Config) -> Callable[[int], list[EditRecord]]:
    """Records by epoch: a file's are the same in every epoch, the built-in world draws new answers each time."""
    if config.data.train == "builtin":
        return lambda epoch: world_records("train", seed=config.seed * 100_003 + epoch)
    records = read_records(config.data.train, config.data.format)
    return lambda _epoch: records


def validation_records(config: Config) -> list[EditRecord]:
    """Held-out records, in a seeded order."""
    if config.data.validation == "builtin":
        return world_records("validation", seed=config.seed)
    records = list(read_records(config.data.validation, config.data.format))
    random.Random(f"validation/{config.seed}").shuffle(records)
    return records


def data_fingerprint(config: Config) -> str:
    """A hash of what is trained and validated on."""
    digest = hashlib.sha256()
    for name in (config.data.train, config.data.validation):
        if name == "builtin":
            digest.update(WORLD_MODEL.joinpath("world.json").read_bytes())
            continue
        try:
            with open(name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise EditError(f"cannot read the data file {name!r}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def compatible_records(records: Sequence[EditRecord], number: int) -> list[EditRecord]:
    """The first `number` records of which no two edit the same prompt."""
    chosen: dict[str, EditRecord] = {}
    for record in records:
        if len(chosen) == number:
            break
        chosen.setdefault(record.edit.prompt, record)
    return list(chosen.values())


def check_held_out(config: Config) -> None:
    """Held-out scores must be about the same matter as the training: invented people say nothing of a real model."""
    train, validation = config.data.train, config.data.validation
    if (train == "builtin") != (validation == "builtin") and config.model.name != "builtin":
        given, missing = ("train", "validation") if validation == "builtin" else ("validation", "train")
        raise UsageError(
            f"data.{given} is a file and data.{missing} is not given, so it would be the built-in world, of which the "
            f"model {config.model.name!r} knows nothing; name a file for it too: data.{missing}=FILE"
        )


def shared_facts(config: Config, train: Iterable[EditRecord], held_out: Sequence[EditRecord]) -> str | None:
    """What is to be said of held-out records whose fact is trained on too, in any wording: their scores flatter."""
    known = {fact.prompt for record in train for fact in (record.edit, *record.equivalents)}
    shared = [record.edit.prompt for record in held_out if record.edit.prompt in known]
    if not shared:
        return None
    return (
        f"{len(shared)} of the {len(held_out)} held-out records of {config.data.validation} are edited in training too "
        f"(such as {shared[0]!r}): their scores are of facts that were trained on"
    )


def check_facts(
    encoder: FactEncoder, records: Iterable[EditRecord], encode: Callable[[Fact], EncodedFact] | None = None
) -> None:
    """Fail before hours of work, not when it comes to a fact that this model cannot be given."""
    short = encoder.max_length - len(encoder.prompt_ids("?")) - 1  # BOS and chat template take their part
    for record in records:
        for fact in (record.edit, *record.equivalents, *record.unrelated):
            # No tokenizer here makes more tokens than bytes, so short texts need no look; a class may be unknown.
            if encoder.kind == "classifier" or len(f"{fact.prompt} {fact.answer}".encode()) >= short:
                (encode or encoder.encode)(fact)


def preserved_facts(config: Config, records: Iterable[EditRecord]) -> list[Fact]:
    """Unrelated training facts whose keys an edit is to leave alone: different ones, drawn by the seed."""
    facts = list(dict.fromkeys(fact for record in records for fact in record.unrelated))
    if not facts:
        raise EditError(
            f"editor.preserved_weight is {config.editor.preserved_weight:g}, but the records of {config.data.train} "
            "have no unrelated facts whose keys could be preserved: add some, or set it to 0"
        )
    random.Random(f"preserved/{config.seed}").shuffle(facts)
    return facts[: config.editor.preserved_facts]


def unrelated_to_all(records: Sequence[EditRecord]) -> list[list[Fact]]:
    """Each record's unrelated tuples without those that another record edits: ∩ U(x_i, y_i), eq. 1."""
    touched = {fact.prompt for record in records for fact in (record.edit, *record.equivalents)}
    return [[fact for fact in record.unrelated if fact.prompt not in touched] for record in records]


@dataclass
class Sampler:
    """Meta-batches by step."""

    config: Config
    encoder: FactEncoder
    records: Callable[[int], list[EditRecord]]
    _epoch: tuple[int, list[EditRecord]] = (-1, [])
    _encoded: dict[Fact, EncodedFact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.training.locality_tokens == "all" and self.encoder.kind != "decoder":
            raise UsageError(
                f"training.locality_tokens=all is for decoders; this model is of kind {self.encoder.kind!r}, where the "
                "tokens of a prompt predict nothing: use `answer`"
            )
        self.steps_per_epoch = len(self.records(0)) // self.config.training.num_edits
        if self.steps_per_epoch == 0:
            raise EditError(
                f"training.num_edits is {self.config.training.num_edits}, but {self.config.data.train} has only "
                f"{len(self.records(0))} records"
            )

    def recurring(self) -> tuple[str, ...]:
        """The roles whose facts come again, in this run or another, so that a cache of them is of use."""
        if self.config.batch.cache_dir is not None:
            return ROLES
        if self.config.training.steps <= self.steps_per_epoch:
            return ()
        if self.config.data.train == "builtin":  # every epoch contradicts it with new answers
            return ("unrelated",)
        return ROLES

    def caches(self, base_model: str, dtype: torch.dtype) -> dict[str, FactCache]:
        """One cache for all roles that have a use for it, with the config's budget. Fingerprint and type of the LM tell
        whose work it is, where several share a folder."""
        batch = self.config.batch
        roles = self.recurring() if batch.cache_mb else ()
        if not roles:
            return {}
        name = f"{base_model}-{str(dtype).removeprefix('torch.')}"
        folder = Path(batch.cache_dir) / name if batch.cache_dir is not None else None
        return dict.fromkeys(roles, FactCache(batch.cache_mb * 2**20, folder))

    def check_lengths(self) -> None:
        """Fail before the first step, not at the one that draws a fact that is too long."""
        check_facts(self.encoder, self.records(0), self._encode)

    def batch(self, step: int) -> MetaBatch:
        """The tuples of this step."""
        training = self.config.training
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        rng = random.Random(f"step/{self.config.seed}/{step}")
        some = compatible_records(order[place * training.num_edits :] + order, self._num_edits(step))
        equivalents = [fact for record in some for fact in self._equivalents(record, rng)]
        unrelated = [
            fact
            for facts in unrelated_to_all(some)
            for fact in rng.sample(facts, min(training.unrelated_per_edit, len(facts)))
        ]
        return MetaBatch(
            [self._encode(record.edit) for record in some],
            [self._encode(fact) for fact in equivalents],
            [self._unrelated(fact) for fact in unrelated],
            [record.id for record in some],
        )

    def _num_edits(self, step: int) -> int:
        """m of this step: as often between 16 and 32 as between 128 and 256."""
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

    def _unrelated(self, fact: Fact) -> EncodedFact:
        encoded = self._encode(fact)
        return encoded if self.config.training.locality_tokens == "answer" else encoded.throughout()

    def _encode(self, fact: Fact) -> EncodedFact:
        if fact not in self._encoded:
            self._encoded[fact] = self.encoder.encode(fact)
        return self._encoded[fact]
