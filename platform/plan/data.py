"""The lengths of a step's facts: counted in the data file if it exists, else assumed, and stated as such."""

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
from malmen.data.world import WORLD_MODEL, world_records
from malmen.lm.model import LanguageModel, fact_encoder

SAMPLE = 128  # records whose tokens are counted
BYTES_PER_TOKEN = 4  # of English, where the tokenizer is not on this machine
FACT_TOKENS, ANSWER_TOKENS = 14, 3  # of zsRE with GPT-2's tokenizer, roughly
CHAT_TOKENS = 10  # that a template adds, roughly
SIZES = {"zsre": 244_173, "fever": 104_996, "counterfact": 21_919}  # training records, as published

Encode = Callable[[Fact], EncodedFact]


@dataclass(frozen=True)
class StepFacts:
    """The facts of one step, as many as the config says; lengths only, all tokens are 0."""

    edits: list[EncodedFact]
    equivalents: list[EncodedFact]
    unrelated: list[EncodedFact]
    pools: dict[str, float]  # by kind, tokens of all facts of a record that a step may draw, on average
    num_records: int  # 0: unknown
    source: str

    @property
    def by_kind(self) -> dict[str, list[EncodedFact]]:
        """The facts by kind, as the sampler names them."""
        return {"edits": self.edits, "equivalents": self.equivalents, "unrelated": self.unrelated}

    def recurring(self, config: Config) -> tuple[str, ...]:
        """The kinds whose facts recur within the run (Sampler.recurring)."""
        if config.training.steps <= self.num_records // config.training.num_edits:
            return ()
        return ("unrelated",) if config.data.train == "builtin" else tuple(self.by_kind)

    def recurring_tokens(self, config: Config, kind: str) -> float:
        """Tokens of all different facts of a kind that the run will draw, roughly."""
        drawn = config.training.steps * sum(fact.length for fact in self.by_kind[kind])
        return min(drawn, self.pools[kind] * self.num_records) if self.num_records else drawn


@dataclass(frozen=True)
class Pools:
    """The facts of sampled records that a step may draw, by kind: a list for each record."""

    edits: list[list[EncodedFact]]
    equivalents: list[list[EncodedFact]]
    unrelated: list[list[EncodedFact]]
    num_records: int
    source: str


def find_pools(
    config: Config, lm: LanguageModel, fact_tokens: int | None = None, answer_tokens: int | None = None
) -> Pools:
    """The facts of the data file if it exists and no lengths are given; else one record of those lengths."""
    here = config.data.train == "builtin" or Path(config.data.train).is_file()
    if here and fact_tokens is None and answer_tokens is None:
        encode, how = _encoder(config, lm)
        records, number = _sample(config.data.train, config.data.format, config.seed)
        source = f"{len(records)} records of {config.data.train}, {how}"
    else:
        fact = _fact(config, lm.kind, fact_tokens or FACT_TOKENS, answer_tokens or ANSWER_TOKENS)
        encode = lambda _fact: fact  # noqa: E731
        any_fact, training = Fact("", ""), config.training
        others = (any_fact,) * training.equivalents_per_edit, (any_fact,) * training.unrelated_per_edit
        record = EditRecord(any_fact, *others)
        records, number = [record], SIZES.get(config.data.format, 0)
        known = f"{number:,} records" if number else "an unknown number of records"
        how = "given" if fact_tokens or answer_tokens else "assumed"
        source = f"{how} lengths, {known}" + ("" if here else f"; {config.data.train} is not on this machine")
    return Pools(
        [[encode(record.edit)] for record in records],
        [[encode(fact) for fact in record.equivalents or (record.edit,)] for record in records],
        [[encode(fact) for fact in record.unrelated] for record in records],
        number,
        source,
    )


def step_facts(config: Config, pools: Pools) -> StepFacts:
    """As many facts as the config says; where there are fewer records, they are repeated."""
    training = config.training
    equivalents = [pool[: training.equivalents_per_edit] for pool in pools.equivalents]
    if training.include_edit:
        equivalents = [edit + pool for edit, pool in zip(pools.edits, equivalents, strict=True)]
    unrelated = [pool[: training.unrelated_per_edit] for pool in pools.unrelated]
    if training.locality_tokens == "all":
        unrelated = [[fact.throughout() for fact in pool] for pool in unrelated]
    by_kind = {"edits": pools.edits, "equivalents": pools.equivalents, "unrelated": pools.unrelated}
    return StepFacts(
        _repeat(pools.edits, training.num_edits),
        _repeat(equivalents, training.num_edits),
        _repeat(unrelated, training.num_edits),
        {kind: sum(fact.length for pool in parts for fact in pool) / len(parts) for kind, parts in by_kind.items()},
        pools.num_records,
        pools.source,
    )


def _repeat(parts: Sequence[list[EncodedFact]], number: int) -> list[EncodedFact]:
    return [fact for index in range(number) for fact in parts[index % len(parts)]]


@lru_cache(maxsize=4)
def _sample(name: str, format: str, seed: int) -> tuple[list[EditRecord], int]:
    """A sample of the records, and their number; of a JSONL file, which may be long, only its first lines."""
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
    """Facts to tokens with the model's tokenizer if it is on this machine, else by the length of their texts."""
    name = config.model.name
    folder = WORLD_MODEL if name == "builtin" else Path(name).expanduser()
    if folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        return fact_encoder(LanguageModel(lm.model, tokenizer, lm.kind), config.data).encode, "in tokens"

    def estimate(fact: Fact) -> EncodedFact:
        prompt, answer = (-(-len(text.encode()) // BYTES_PER_TOKEN) for text in (fact.prompt, fact.answer))
        return _fact(config, lm.kind, prompt + answer, answer)

    return estimate, f"at {BYTES_PER_TOKEN} bytes a token, because the tokenizer is not on this machine"


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
