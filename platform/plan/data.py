"""How long the facts of a step are: read from the data where they are here, else assumed and said so."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import EncodedFact, Kind
from malmen.data.world import world_records
from malmen.data.world_model import WORLD_MODEL
from malmen.lm.model import LanguageModel, fact_encoder

SAMPLE = 128  # records whose tokens are counted
BYTES_PER_TOKEN = 4  # of English, where the tokenizer is not here
FACT_TOKENS, ANSWER_TOKENS = 14, 3  # of zsRE with GPT-2's tokenizer, roughly
CHAT_TOKENS = 10  # a template's own, roughly
SIZES = {"zsre": 244_173, "fever": 104_996, "counterfact": 21_919}  # training records, as published

Encode = Callable[[Fact], EncodedFact]


@dataclass(frozen=True)
class StepFacts:
    """The facts of one step, as lengths (the tokens themselves are zeros); as many as the config asks for."""

    edits: list[EncodedFact]
    equivalents: list[EncodedFact]
    unrelated: list[EncodedFact]
    pools: dict[str, float]  # by role, tokens of all the facts that a record has to draw from
    num_records: int  # 0: unknown
    source: str

    @property
    def roles(self) -> dict[str, list[EncodedFact]]:
        """By the names that the sampler uses."""
        return {"edits": self.edits, "equivalents": self.equivalents, "unrelated": self.unrelated}

    def recurring(self, config: Config) -> tuple[str, ...]:
        """The roles whose facts come again within the run (Sampler.recurring)."""
        if config.training.steps <= self.num_records // config.training.num_edits:
            return ()
        return ("unrelated",) if config.data.train == "builtin" else tuple(self.roles)

    def recurring_tokens(self, config: Config, role: str) -> float:
        """Of all different facts of a role that the run will draw, roughly."""
        drawn = config.training.steps * sum(fact.length for fact in self.roles[role])
        return min(drawn, self.pools[role] * self.num_records) if self.num_records else drawn


@dataclass(frozen=True)
class Pools:
    """What some records have to draw from, by role: a list of facts for each record."""

    edits: list[list[EncodedFact]]
    equivalents: list[list[EncodedFact]]
    unrelated: list[list[EncodedFact]]
    num_records: int
    source: str


def find_pools(
    config: Config, lm: LanguageModel, fact_tokens: int | None = None, answer_tokens: int | None = None
) -> Pools:
    """Of the data file if it exists, unless the lengths are given; one record stands for all where none are here."""
    here = config.data.train == "builtin" or Path(config.data.train).is_file()
    if here and fact_tokens is None and answer_tokens is None:
        encode, how = _encoder(config, lm)
        records, number = _sample(config.data.train, config.data.format, config.seed)
        source = f"{len(records)} records of {config.data.train}, {how}"
    else:
        fact = _fact(config, lm.kind, fact_tokens or FACT_TOKENS, answer_tokens or ANSWER_TOKENS)
        encode = lambda _fact: fact  # noqa: E731
        some, training = (Fact("", ""),), config.training
        record = EditRecord(*some, some * training.equivalents_per_edit, some * training.unrelated_per_edit)
        records, number = [record], SIZES.get(config.data.format, 0)
        known = f"{number:,} records" if number else "an unknown number of records"
        how = "given" if fact_tokens or answer_tokens else "assumed"
        source = f"{how} lengths, {known}" + ("" if here else f"; no {config.data.train} here")
    return Pools(
        [[encode(record.edit)] for record in records],
        [[encode(fact) for fact in record.equivalents or (record.edit,)] for record in records],
        [[encode(fact) for fact in record.unrelated] for record in records],
        number,
        source,
    )


def step_facts(config: Config, pools: Pools) -> StepFacts:
    """As many as the config asks for; where there are fewer records, they are repeated."""
    training = config.training
    equivalents = [pool[: training.equivalents_per_edit] for pool in pools.equivalents]
    if training.include_edit:
        equivalents = [edit + some for edit, some in zip(pools.edits, equivalents, strict=True)]
    unrelated = [pool[: training.unrelated_per_edit] for pool in pools.unrelated]
    if training.locality_tokens == "all":
        unrelated = [[fact.throughout() for fact in pool] for pool in unrelated]
    by_role = {"edits": pools.edits, "equivalents": pools.equivalents, "unrelated": pools.unrelated}
    return StepFacts(
        _repeat(pools.edits, training.num_edits),
        _repeat(equivalents, training.num_edits),
        _repeat(unrelated, training.num_edits),
        {role: sum(fact.length for pool in parts for fact in pool) / len(parts) for role, parts in by_role.items()},
        pools.num_records,
        pools.source,
    )


def _repeat(parts: Sequence[list[EncodedFact]], number: int) -> list[EncodedFact]:
    return [fact for index in range(number) for fact in parts[index % len(parts)]]


@lru_cache(maxsize=4)
def _sample(name: str, format: str, seed: int) -> tuple[list[EditRecord], int]:
    """Some records, and how many there are; of lines, which may be many, only the first are read."""
    if name == "builtin":
        records = world_records("train", seed=seed)
        return records[:SAMPLE], len(records)
    if not name.endswith(".jsonl"):
        records = read_records(name, format)
        return random.Random(seed).sample(records, min(SAMPLE, len(records))), len(records)
    with open(name, encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / Path(name).name
        first.write_text("".join(islice(file, SAMPLE)), encoding="utf-8")
        number = SAMPLE + sum(1 for line in file if line.strip())
        records = read_records(first, format)
    return records, number if len(records) >= SAMPLE else len(records)


def _encoder(config: Config, lm: LanguageModel) -> tuple[Encode, str]:
    """Facts to tokens with the model's tokenizer if it is here, else by the length of their texts."""
    name = config.model.name
    folder = WORLD_MODEL if name == "builtin" else Path(name).expanduser()
    if folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        return fact_encoder(LanguageModel(lm.model, tokenizer, lm.kind), config.data).encode, "in tokens"

    def estimate(fact: Fact) -> EncodedFact:
        prompt, answer = (-(-len(text.encode()) // BYTES_PER_TOKEN) for text in (fact.prompt, fact.answer))
        return _fact(config, lm.kind, prompt + answer, answer)

    return estimate, f"at {BYTES_PER_TOKEN} bytes a token, for the tokenizer is not here"


def _fact(config: Config, kind: Kind, length: int, answers: int) -> EncodedFact:
    """A fact of so many tokens, answer included."""
    length = max(length, answers + 1)
    if config.data.prompt_format == "chat":
        length += CHAT_TOKENS
    length = min(length, config.data.max_length)
    if kind == "classifier":
        return EncodedFact([0] * length, 0, [0])
    if kind == "encoder-decoder":  # the answer ends with EOS
        return EncodedFact([0] * (answers + 1), 0, [0] * (answers + 1), [0] * max(1, length - answers))
    return EncodedFact([0] * (length - 1), length - 1 - answers, [0] * answers)
