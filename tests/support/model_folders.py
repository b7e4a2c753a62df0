"""Tiny models of three kinds as folders on disk, with the built-in world's tokenizer and records that fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from malmen.data.world import WORLD_MODEL, world_records
from malmen.lm.model import FirstTokenClassifier

FOLDER_KINDS = ("gpt2", "t5", "bert")


def write_model(name: str, folder: Path) -> Path:
    """A model with random weights, large enough that attention and FFN matter."""
    tokenizer = AutoTokenizer.from_pretrained(WORLD_MODEL)
    size = len(tokenizer)
    torch.manual_seed(0)
    model: Any
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=12, n_layer=3, n_head=2))
    elif name == "t5":
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=size, d_model=12, d_kv=6, d_ff=20, num_layers=3, num_heads=2, decoder_start_token_id=0,
                tie_word_embeddings=False,
            )
        )  # fmt: skip
    else:
        model = FirstTokenClassifier(
            BertConfig(
                vocab_size=size, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
                max_position_embeddings=64,
            )
        )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_records(name: str, file: Path, number: int = 40) -> Path:
    """Records of the built-in world; for a classifier, claims with labels."""
    rows = []
    for index, record in enumerate(world_records("train", seed=0)[:number]):
        facts = [record.edit, *record.equivalents[:1], *record.unrelated[:1]]
        pairs = [{"prompt": fact.prompt, "answer": fact.answer} for fact in facts]
        if name == "bert":
            for place, pair in enumerate(pairs):
                pair["prompt"] += f" {pair['answer']}"
                pair["answer"] = ("REFUTES", "SUPPORTS")[(index + place) % 2]
        rows.append({**pairs[0], "equivalents": pairs[1:2], "unrelated": pairs[2:], "id": f"r{index}"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
