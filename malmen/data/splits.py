"""The training and the held-out records of a run, and the checks on them that come before any work."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.records import EditRecord, Fact
from malmen.data.world import WORLD_MANIFEST, WORLD_MODEL, world_records
from malmen.errors import EditError, UsageError

if TYPE_CHECKING:
    from malmen.data.tokens import EncodedFact, FactEncoder


def training_records(config: Config) -> Callable[[int], list[EditRecord]]:
    """Records by epoch: a file has the same in every epoch, the built-in world draws new answers each time."""
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
            digest.update((WORLD_MODEL / WORLD_MANIFEST).read_bytes())
            continue
        try:
            with open(name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise EditError(f"cannot read the data file {name!r}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def check_held_out(config: Config) -> None:
    """UsageError where only one split is a file: the built-in world says nothing about another model."""
    train, validation = config.data.train, config.data.validation
    if (train == "builtin") != (validation == "builtin") and config.model.name != "builtin":
        given, missing = ("train", "validation") if validation == "builtin" else ("validation", "train")
        raise UsageError(
            f"data.{given} is a file and data.{missing} is not given, so it would be the built-in world, of which the "
            f"model {config.model.name!r} knows nothing; name a file for it too: data.{missing}=FILE"
        )


def shared_facts(config: Config, train: Iterable[EditRecord], held_out: Sequence[EditRecord]) -> str | None:
    """A warning if held-out records edit facts that are trained on too, in any wording; None if none does."""
    known = {fact.prompt for record in train for fact in (record.edit, *record.equivalents)}
    shared = [record.edit.prompt for record in held_out if record.edit.prompt in known]
    if not shared:
        return None
    return (
        f"{len(shared)} of the {len(held_out)} held-out records of {config.data.validation} are edited in training too "
        f"(such as {shared[0]!r}): their scores measure facts that were trained on"
    )


def check_encodable(
    encoder: FactEncoder, records: Iterable[EditRecord], encode: Callable[[Fact], EncodedFact] | None = None
) -> None:
    """EditError for a fact that the model's `encoder` refuses, before hours of work instead of after them."""
    short = encoder.max_length - len(encoder.prompt_ids("?")) - 1  # BOS and chat template need room too
    for record in records:
        following = (*record.portability, *record.reversal)
        for fact in (record.edit, *record.equivalents, *record.unrelated, *following):
            # No tokenizer makes more tokens than bytes, so short texts fit; a classifier may not know the answer.
            if encoder.kind == "classifier" or len(f"{fact.prompt} {fact.answer}".encode()) >= short:
                (encode or encoder.encode)(fact)
