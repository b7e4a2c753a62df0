"""Fine-tuning BERT to classify claims as true or false, before it is edited (the paper's appendix on FEVER).

The records of FEVER are edits, whose labels contradict the truth. The classifier learns the truth: labels of edits and
equivalents are inverted, those of unrelated claims are true already.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel

from malmen.data.readers import read_records
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import CLASSES, EncodedFact, FactEncoder, make_batches
from malmen.errors import EditError
from malmen.lm.devices import resolve_device
from malmen.runs.files import atomic_file, atomic_folder, check_replaceable

MANIFEST = "claims.json"  # marks a folder that may be replaced
_EVALUATION_TOKENS = 8192  # padded tokens per batch
OnStep = Callable[[int, int], None]  # steps done, of so many
OnEpoch = Callable[[int, float, float | None], None]  # epochs done, mean loss, share right


def true_claims(records: Sequence[EditRecord]) -> list[Fact]:
    """Every claim of the records once, with its true label."""
    claims: dict[str, Fact] = {}
    for record in records:
        for fact in (record.edit, *record.equivalents):
            claims.setdefault(fact.prompt, Fact(fact.prompt, CLASSES[1 - CLASSES.index(fact.answer)]))
    for record in records:
        for fact in record.unrelated:
            claims.setdefault(fact.prompt, fact)
    return list(claims.values())


@dataclass(frozen=True)
class ClaimsTraining:
    """The settings of the fine-tuning; the paper's where it states them."""

    epochs: int = 2
    lr: float = 3e-5
    batch_size: int = 32
    max_length: int = 128
    seed: int = 0


def build_classifier(
    name: str, train: Path, out: Path, *, validation: Path | None = None, training: ClaimsTraining | None = None,
    device: str = "auto", on_step: OnStep | None = None, on_epoch: OnEpoch | None = None,
) -> float | None:  # fmt: skip
    """Fine-tune all parameters with Adam into `out`; returns the share of right labels on the validation claims."""
    from malmen.config import ModelConfig
    from malmen.lm.model import FirstTokenClassifier

    training = training or ClaimsTraining()
    check_replaceable(out, MANIFEST)
    claims = [true_claims(read_records(path, "fever")) if path else [] for path in (train, validation)]
    torch.manual_seed(training.seed)
    try:
        model: PreTrainedModel = FirstTokenClassifier.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise EditError(f"cannot load the model {name!r}: {str(error).splitlines()[0]}") from error
    model = model.to(resolve_device(ModelConfig(name=name, device=device)))  # type: ignore[arg-type]
    encoder = FactEncoder(tokenizer, "classifier", max_length=training.max_length, overlong="truncate")
    learnt, held_out = ([encoder.encode(fact) for fact in facts] for facts in claims)
    optimizer, accuracy, pad = torch.optim.Adam(model.parameters(), lr=training.lr), None, tokenizer.pad_token_id or 0
    for epoch in range(training.epochs):
        loss = _epoch(model, optimizer, learnt, pad, training, epoch, on_step)
        accuracy = _accuracy(model, held_out, pad) if held_out else None
        if on_epoch:
            on_epoch(epoch + 1, loss, accuracy)
    with atomic_folder(out, replaces=MANIFEST) as folder:
        atomic_file(
            folder / MANIFEST, json.dumps({"model": name, **asdict(training), "validation_accuracy": accuracy}) + "\n"
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return accuracy


def _epoch(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, facts: Sequence[EncodedFact], pad: int,
    training: ClaimsTraining, epoch: int, on_step: OnStep | None,
) -> float:  # fmt: skip
    """One pass over the facts, in an order that seed and epoch fix; returns the mean loss."""
    model.train()
    size, total = training.batch_size, 0.0
    order = random.Random(f"claims/{training.seed}/{epoch}").sample(facts, len(facts))
    steps = -(-len(order) // size)
    for step in range(steps):
        (batch,) = make_batches(order[step * size : (step + 1) * size], sys.maxsize, pad)
        batch = batch.to(model.device)
        logits = model(**batch.inputs).logits.squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.targets.to(logits))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += float(loss.detach()) * len(batch.targets)
        if on_step:
            on_step(epoch * steps + step + 1, training.epochs * steps)
    return total / len(order)


@torch.no_grad()
def _accuracy(model: PreTrainedModel, facts: Sequence[EncodedFact], pad: int) -> float:
    model.eval()
    right = 0
    for batch in make_batches(facts, _EVALUATION_TOKENS, pad):
        batch = batch.to(model.device)
        right += int(((model(**batch.inputs).logits.squeeze(-1) > 0) == (batch.targets == 1)).sum())
    return right / len(facts)
