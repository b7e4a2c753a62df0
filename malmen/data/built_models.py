"""The models that malmen trains itself: the GPT-2 of the built-in world, and BERT on claims (appendix on FEVER).

The records of FEVER are edits, whose labels contradict the truth. The classifier learns the truth: labels of edits and
equivalents are inverted, those of unrelated claims are true already.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from malmen.data.readers import read_records
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import CLASSES, EncodedFact, FactEncoder, TokenBatch, make_batches, one_batch
from malmen.data.world import WORLD_MANIFEST, WORLD_SEED, make_world
from malmen.errors import EditError
from malmen.runs.files import atomic_folder, check_replaceable

CLAIMS_MANIFEST = "claims.json"  # marks a folder that may be replaced
END = "<|end|>"
LABEL_SMOOTHING = 0.1  # keeps the model of the world from being certain; its effect on editing was not measured
PROMPT_WEIGHT = 0.1  # answers matter most; prompts only make it a language model
_EVALUATION_TOKENS = 8192  # padded tokens per batch
Facts = Sequence[EncodedFact]
OnStep = Callable[[int, int], None]  # steps done, of so many
OnEpoch = Callable[[int, float, Any], None]  # epochs done, mean loss, share of facts right (None: nothing measured)


@dataclass(frozen=True)
class Training:
    """The settings of a training; the defaults are those of the classifier: the paper's where it states them."""

    epochs: int = 2
    lr: float = 3e-5
    batch_size: int = 32
    max_length: int = 128
    seed: int = 0


@dataclass(frozen=True)
class _Trainee:
    """A model in training: its loss, and the answer tokens it finds most probable, listed as `TokenBatch.targets`."""

    name: str  # of the kind of training, for the order of its facts
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, TokenBatch], Tensor]
    answers: Callable[[Any, TokenBatch], Tensor]
    max_norm: float = math.inf  # of gradients

    def fit(
        self, learnt: Facts, measured: Facts, training: Training, on_step: OnStep | None, on_epoch: OnEpoch | None
    ) -> float | None:
        """Train on `learnt`, in orders that seed and epoch fix; returns the accuracy on `measured` after the last."""
        size, accuracy = training.batch_size, None
        steps = -(-len(learnt) // size)
        for epoch in range(training.epochs):
            self.model.train()
            total = 0.0
            order = random.Random(f"{self.name}/{training.seed}/{epoch}").sample(learnt, len(learnt))
            for step in range(steps):
                batch = one_batch(order[step * size : (step + 1) * size], self.tokenizer.pad_token_id or 0).to(
                    self.model.device
                )
                loss = self.loss(self.model, batch)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.optimizer.step()
                total += float(loss.detach()) * len(batch.facts)
                if on_step:
                    on_step(epoch * steps + step + 1, training.epochs * steps)
            accuracy = self.accuracy(measured) if measured else None
            if on_epoch:
                on_epoch(epoch + 1, total / len(order), accuracy)
        return accuracy

    @torch.no_grad()
    def accuracy(self, facts: Facts) -> float:
        """The share of facts of whose answer every token is right."""
        self.model.eval()
        right = len(facts)
        for batch in make_batches(facts, _EVALUATION_TOKENS, self.tokenizer.pad_token_id or 0):
            batch = batch.to(self.model.device)
            missed = self.answers(self.model, batch) != batch.targets
            right -= len(batch.fact_of(batch.answer_mask)[missed].unique())
        return right / len(facts)

    def save(self, folder: Path, marker: str, manifest: Mapping[str, object]) -> None:
        """Write the model, its tokenizer and its manifest, whose name marks the folder as ours."""
        with atomic_folder(folder, replaces=marker) as fresh:
            self.model.save_pretrained(fresh)
            self.tokenizer.save_pretrained(fresh)
            (fresh / marker).write_text(json.dumps(manifest, indent=1) + "\n")


def build_world_model(
    folder: Path, *, seed: int = WORLD_SEED, max_epochs: int = 15, width: int = 160, on_epoch: OnEpoch | None = None
) -> dict[str, object]:
    """Train the LM, measure the share of facts that it answers exactly, and write the model folder; its manifest."""
    check_replaceable(folder, WORLD_MANIFEST)
    start = time.perf_counter()
    torch.manual_seed(seed)
    world = make_world()
    tokenizer = _train_tokenizer(world.facts())
    encoder = FactEncoder(tokenizer, "decoder", append_eos=True)
    facts = [encoder.encode(fact) for fact in world.facts()]
    others: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    others |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=width, n_layer=6, n_head=width // 32, **others)
    )
    training = Training(epochs=max_epochs, lr=2e-3, batch_size=128, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.01)
    steps = max_epochs * -(-len(facts) // training.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=training.lr, total_steps=steps, pct_start=0.05)
    trainee = _Trainee("world", model, tokenizer, optimizer, _world_loss, _world_answers, max_norm=1.0)
    trainee.fit(facts, facts[::5], training, lambda _step, _steps: schedule.step(), on_epoch)
    # The shipped weights are rounded to half precision, so these are measured.
    model.half().float()
    manifest: dict[str, object] = {
        "world": world.fingerprint(),
        "seed": seed,
        "facts": len(facts),
        "accuracy": trainee.accuracy(facts),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - start),
    }
    model.half()
    trainee.save(folder, WORLD_MANIFEST, manifest)
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


def _world_loss(model: GPT2LMHeadModel, batch: TokenBatch) -> Tensor:
    ids = batch.inputs["input_ids"]
    following = ids.roll(-1, dims=1)
    following[batch.answer_mask] = batch.targets
    logits = model(ids, use_cache=False).logits
    losses = F.cross_entropy(logits.transpose(1, 2), following, reduction="none", label_smoothing=LABEL_SMOOTHING)
    prompts = batch.masks["decoder"] & ~batch.answer_mask
    return losses[batch.answer_mask].mean() + PROMPT_WEIGHT * losses[prompts].mean()


def _world_answers(model: GPT2LMHeadModel, batch: TokenBatch) -> Tensor:
    return model(batch.inputs["input_ids"], use_cache=False).logits[batch.answer_mask].argmax(-1)


def build_classifier(
    name: str, train: Path, out: Path, *, validation: Path | None = None, training: Training | None = None,
    device: str = "auto", on_step: OnStep | None = None, on_epoch: OnEpoch | None = None,
) -> float | None:  # fmt: skip
    """Fine-tune all parameters with Adam into `out`; returns the share of right labels on the validation claims."""
    from malmen.config import ModelConfig
    from malmen.lm.devices import resolve_device
    from malmen.lm.model import FirstTokenClassifier

    training = training or Training()
    check_replaceable(out, CLAIMS_MANIFEST)
    claims = [true_claims(read_records(path, "fever")) if path else [] for path in (train, validation)]
    torch.manual_seed(training.seed)
    try:
        model, tokenizer = FirstTokenClassifier.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise EditError(f"cannot load the model {name!r}: {str(error).splitlines()[0]}") from error
    model = model.to(resolve_device(ModelConfig(name=name, device=device)))  # type: ignore[arg-type]
    encoder = FactEncoder(tokenizer, "classifier", max_length=training.max_length, overlong="truncate")
    learnt, held_out = ([encoder.encode(fact) for fact in facts] for facts in claims)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.lr)
    trainee = _Trainee("claims", model, tokenizer, optimizer, _claims_loss, _claims_answers)
    accuracy = trainee.fit(learnt, held_out, training, on_step, on_epoch)
    trainee.save(out, CLAIMS_MANIFEST, {"model": name, **asdict(training), "validation_accuracy": accuracy})
    return accuracy


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


def _claims_loss(model: Any, batch: TokenBatch) -> Tensor:
    logits = model(**batch.inputs).logits.squeeze(-1)
    return F.binary_cross_entropy_with_logits(logits, batch.targets.to(logits))


def _claims_answers(model: Any, batch: TokenBatch) -> Tensor:
    return (model(**batch.inputs).logits.squeeze(-1) > 0).long()
