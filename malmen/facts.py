"""Facts to micro-batches for a given model and config."""

from __future__ import annotations

from collections.abc import Sequence

from malmen.config import Config, DataConfig
from malmen.data.records import Fact
from malmen.data.tokens import FactEncoder, TokenBatch, make_batches
from malmen.lm import LanguageModel


def fact_encoder(lm: LanguageModel, data: DataConfig) -> FactEncoder:
    """The encoder of facts for this model."""
    return FactEncoder(
        lm.tokenizer,
        lm.kind,
        prompt_format=data.prompt_format,
        max_length=min(data.max_length, lm.max_positions or data.max_length),
        overlong=data.overlong,
        append_eos=data.append_eos,
        decoder_start=lm.decoder_start,
    )


def encode_batches(lm: LanguageModel, facts: Sequence[Fact], config: Config) -> list[TokenBatch]:
    """Micro-batches within the config's token budget."""
    encoder = fact_encoder(lm, config.data)
    return make_batches([encoder.encode(fact) for fact in facts], config.batch.token_budget, lm.pad_id)
