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
from malmen.data.sampling import recurring_kinds
from malmen.data.tokens import EncodedFact, Kind
from malmen.data.world import WORLD_MODEL, world_records
from malmen.lm.layers import LayerSpec
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
        """The kinds whose facts recur within the run; of unknown records none is known to."""
        return recurring_kinds(config, self.num_records) if self.num_records else ()

    def recurring_tokens(self, config: Config, kind: str) -> float:
        """Tokens of all different facts of a kind that the run will draw, roughly."""
        drawn = config.training.steps * sum(fact.length for fact in self.by_kind[kind])
        return min(drawn, self.pools[kind] * self.num_records)


def step_facts(
    config: Config, lm: LanguageModel, fact_tokens: int | None = None, answer_tokens: int | None = None
) -> StepFacts:
    """Facts of the data file if it exists and no lengths are given, else of those lengths; repeated where there are
    fewer than a step has."""
    training, known = config.training, config.data.train == "builtin" or Path(config.data.train).is_file()
    if known and fact_tokens is None and answer_tokens is None:
        encode, how = _encoder(config, lm)
        records, number = _sample(config.data.train, config.data.format, config.seed)
        source = f"{len(records)} records of {config.data.train}, {how}"
    else:
        lengths = fact_tokens or FACT_TOKENS, answer_tokens or ANSWER_TOKENS
        encode = lambda _fact: _fact_of(config, lm.kind, *lengths)  # noqa: E731
        one, number = Fact("", ""), SIZES.get(config.data.format, 0)
        records = [EditRecord(one, (one,) * training.equivalents_per_edit, (one,) * training.unrelated_per_edit)]
        how = "given" if fact_tokens or answer_tokens else "assumed"
        source = f"{how} lengths, {f'{number:,} records as published' if number else 'an unknown number of records'}"
        source += "" if known else f"; {config.data.train} is not on this machine"
    edits = [[encode(record.edit)] for record in records]
    equivalents = [[encode(fact) for fact in record.equivalents or (record.edit,)] for record in records]
    unrelated = [[encode(fact) for fact in record.unrelated] for record in records]
    pools = {"edits": edits, "equivalents": equivalents, "unrelated": unrelated}
    tokens = {kind: sum(fact.length for pool in parts for fact in pool) / len(parts) for kind, parts in pools.items()}
    if config.data.unrelated != "given":
        own = [[_own_text(config, fact) for fact in pool or edits[0]] for pool in unrelated]
        mixed = config.data.unrelated == "mixed"
        length = sum(fact.length for pool in own for fact in pool) / sum(map(len, own))
        tokens["unrelated"] = mixed * tokens["unrelated"] + config.own_text.texts * length / max(1, number)
        own = [pool[: training.unrelated_per_edit] for pool in own]
        given = [pool[: training.unrelated_per_edit] if mixed else [] for pool in unrelated]
        unrelated = [facts + texts for facts, texts in zip(given, own, strict=True)]
        source += f"; own texts of {config.own_text.max_tokens} tokens"
    else:
        unrelated = [pool[: training.unrelated_per_edit] for pool in unrelated]
    if near := config.data.near_misses:
        asked = [_own_text(config, fact) for (fact,) in edits]
        tokens["unrelated"] += config.own_text.texts * sum(fact.length for fact in asked) / len(asked) / max(1, number)
        unrelated = [facts + [question] * near for facts, question in zip(unrelated, asked, strict=True)]
        source += f"; near misses answered in {config.own_text.max_tokens} tokens"
    equivalents = [pool[: training.equivalents_per_edit] for pool in equivalents]
    if training.include_edit:
        equivalents = [edit + pool for edit, pool in zip(edits, equivalents, strict=True)]
    if training.locality_tokens == "all":
        unrelated = [[fact.throughout() for fact in pool] for pool in unrelated]

    def repeated(parts: list[list[EncodedFact]]) -> list[EncodedFact]:
        return [fact for index in range(training.num_edits) for fact in parts[index % len(parts)]]

    return StepFacts(repeated(edits), repeated(equivalents), repeated(unrelated), tokens, number, source)


def _own_text(config: Config, fact: EncodedFact) -> EncodedFact:
    """A text that the model writes after this fact's prompt; as long as it may become."""
    written = config.own_text.max_tokens
    if fact.encoder_ids is not None:
        return EncodedFact([0] * written, 0, [0] * written, fact.encoder_ids)
    return EncodedFact([0] * (fact.first + written), fact.first, [0] * written)


def count_traced(layers: Sequence[LayerSpec], edits: Sequence[EncodedFact], tokens: str) -> dict[str, int]:
    """How many tokens of these edits are traced in each layer."""
    counts = {stack: sum(fact.num_traced(stack, tokens) for fact in edits) for stack in {at.stack for at in layers}}
    return {layer.name: counts[layer.stack] for layer in layers}


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
        records = read_records(first, format)
        return records, len(records) + sum(1 for line in file if line.strip())


def _encoder(config: Config, lm: LanguageModel) -> tuple[Encode, str]:
    """Facts to tokens with the model's tokenizer if it is on this machine, else by the length of their texts."""
    name = config.model.name
    folder = WORLD_MODEL if name == "builtin" else Path(name).expanduser()
    if folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        return fact_encoder(LanguageModel(lm.model, tokenizer, lm.kind), config.data).encode, "in tokens"

    def estimate(fact: Fact) -> EncodedFact:
        prompt, answer = (-(-len(text.encode()) // BYTES_PER_TOKEN) for text in (fact.prompt, fact.answer))
        return _fact_of(config, lm.kind, prompt + answer, answer)

    return estimate, f"at {BYTES_PER_TOKEN} bytes a token, because the tokenizer is not on this machine"


def _fact_of(config: Config, kind: Kind, length: int, answers: int) -> EncodedFact:
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
