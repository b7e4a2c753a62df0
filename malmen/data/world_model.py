"""Training the small GPT-2 that knows the built-in world; its weights are shipped in `world_lm/`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from malmen.data.records import Fact
from malmen.data.world import WORLD_SEED, make_world
from malmen.errors import EditError
from malmen.runs.files import atomic_folder, check_replaceable

WORLD_MODEL = Path(__file__).parent / "world_lm"
END = "<|end|>"
LABEL_SMOOTHING = 0.1  # keeps the model from being certain; its effect on editing was not measured
_BATCH, _EVALUATION_BATCH = 128, 256  # facts
PROMPT_WEIGHT = 0.1  # answers matter most; prompts only make it a language model


def check_world_model(folder: Path = WORLD_MODEL) -> dict[str, object]:
    """The manifest of the built-in LM; EditError if it is missing or was trained on another world."""
    path = folder / "world.json"
    if not path.exists():
        raise EditError(
            f"the built-in model is missing: {path} does not exist; `malmen world build --out {folder}` creates it"
        )
    manifest = json.loads(path.read_text())
    if manifest["world"] != make_world().fingerprint():
        raise EditError(
            f"the built-in model in {folder} was trained on world {manifest['world']}, this version has world "
            f"{make_world().fingerprint()}; `malmen world build --out {folder}` trains it again"
        )
    return manifest


def build_world_model(
    folder: Path,
    *,
    seed: int = WORLD_SEED,
    max_epochs: int = 15,
    width: int = 160,
    on_epoch: Callable[[int, float, float], None] | None = None,
) -> dict[str, object]:
    """Train the LM, measure the share of facts that it answers exactly, and write the model folder; its manifest."""
    check_replaceable(folder, "world.json")
    start = time.perf_counter()
    torch.manual_seed(seed)
    world = make_world()
    facts = world.facts()
    tokenizer = _train_tokenizer(facts)
    model = GPT2LMHeadModel(_config(tokenizer, width))
    sequences, answer_starts = _tokenise(tokenizer, facts)
    _fit(model, sequences, answer_starts, max_epochs, on_epoch)
    # The shipped weights are rounded to half precision, so these are measured.
    model.half().float()
    accuracy = _exact_accuracy(model, sequences, answer_starts)
    manifest: dict[str, object] = {
        "world": world.fingerprint(),
        "seed": seed,
        "facts": len(facts),
        "accuracy": accuracy,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - start),
    }
    with atomic_folder(folder, replaces="world.json") as fresh:
        model.half().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "world.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _train_tokenizer(facts: list[Fact]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator((f"{fact.prompt} {fact.answer}" for fact in facts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)


def _config(tokenizer: PreTrainedTokenizerFast, width: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=width,
        n_layer=6,
        n_head=width // 32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def _tokenise(tokenizer: PreTrainedTokenizerFast, facts: list[Fact]) -> tuple[list[list[int]], list[int]]:
    sequences, answer_starts = [], []
    for fact in facts:
        prompt = tokenizer(fact.prompt)["input_ids"]
        sequences.append(prompt + tokenizer(" " + fact.answer)["input_ids"] + [tokenizer.eos_token_id])
        answer_starts.append(len(prompt))
    return sequences, answer_starts


def _fit(
    model: GPT2LMHeadModel,
    sequences: list[list[int]],
    answer_starts: list[int],
    max_epochs: int,
    on_epoch: Callable[[int, float, float], None] | None,
) -> None:
    steps = max_epochs * -(-len(sequences) // _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.05)
    accuracy = 0.0
    for epoch in range(1, max_epochs + 1):
        model.train()
        total = 0.0
        order = torch.randperm(len(sequences)).tolist()
        for first in range(0, len(order), _BATCH):
            rows = order[first : first + _BATCH]
            loss = _loss(model, [sequences[row] for row in rows], [answer_starts[row] for row in rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        if epoch % 5 == 0 or epoch == max_epochs:
            accuracy = _exact_accuracy(model, sequences, answer_starts)
        if on_epoch:
            on_epoch(epoch, total / len(order), accuracy)


def _pad(sequences: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in sequences], batch_first=True)


def _loss(model: GPT2LMHeadModel, sequences: list[list[int]], answer_starts: list[int]) -> Tensor:
    tokens = _pad(sequences)
    logits = model(tokens[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none", label_smoothing=LABEL_SMOOTHING)
    positions = torch.arange(1, tokens.shape[1])
    inside = positions < torch.tensor([len(row) for row in sequences])[:, None]
    answers = inside & (positions >= torch.tensor(answer_starts)[:, None])
    return losses[answers].mean() + PROMPT_WEIGHT * losses[inside & ~answers].mean()


@torch.no_grad()
def _exact_accuracy(model: GPT2LMHeadModel, sequences: list[list[int]], answer_starts: list[int]) -> float:
    """The share of facts whose answer, with the end mark, is decoded greedily."""
    model.eval()
    right = 0
    for first in range(0, len(sequences), _EVALUATION_BATCH):
        part = slice(first, first + _EVALUATION_BATCH)
        tokens = _pad(sequences[part])
        hits = model(tokens[:, :-1], use_cache=False).logits.argmax(-1) == tokens[:, 1:]
        for row, start, hit in zip(sequences[part], answer_starts[part], hits, strict=True):
            right += bool(hit[start - 1 : len(row) - 1].all())
    return right / len(sequences)
