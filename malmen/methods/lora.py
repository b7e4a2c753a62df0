"""LoRA fine-tuning: Adam on low-rank factors beside frozen weights (Hu et al., ICLR 2022), on nothing but the facts.

A layer puts out W u + s B A u with s = alpha / rank. A starts at random and B at zero, so training starts from the
unedited model. Afterwards each product s B A is the layer's shift.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.tokens import TokenBatch, make_batches
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import finite, require_facts
from malmen.lm.hooks import hooked
from malmen.lm.layers import LayerSpec
from malmen.lm.losses import nll
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.methods.fine_tune import ffn_layers


@dataclass(frozen=True)
class Factors:
    """The low-rank change of one layer."""

    down: Tensor  # A (rank, key)
    up: Tensor  # B (value, rank)
    scale: float  # s

    @classmethod
    def at_start(cls, layer: LayerSpec, weight: Tensor, rank: int, scale: float, rng: torch.Generator) -> Factors:
        """A from U(−1/√key, 1/√key), as the weights of linears, and B = 0; on the weight's device, at least float32."""
        bound, dtype = layer.key_size**-0.5, torch.promote_types(weight.dtype, torch.float32)
        down = (2 * torch.rand(rank, layer.key_size, generator=rng, dtype=dtype) - 1) * bound
        up = torch.zeros(layer.value_size, rank, dtype=dtype)
        return cls(down.to(weight.device).requires_grad_(), up.to(weight.device).requires_grad_(), scale)

    def hook(self, _: nn.Module, args: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Add s B A u to a linear's output: two thin products, and never a matrix of the weight's size."""
        keys = args[0].to(self.down.dtype)
        return values + (self.scale * F.linear(F.linear(keys, self.down), self.up)).to(values.dtype)

    @torch.no_grad()
    def shift(self) -> Tensor:
        """S = s B A (value, key) in float64."""
        return self.scale * (self.up.double() @ self.down.double())


@contextmanager
def low_rank(lm: LanguageModel, factors: dict[str, Factors]) -> Iterator[None]:
    """Inside, each named layer computes (W + s B A)u + bias, and gradients reach A and B."""
    with hooked([(lm.model.get_submodule(name), part.hook) for name, part in factors.items()]):
        yield


class LoRA(UntrainedMethod):
    """Needs nothing but the model."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        self.config, self.settings = config, config.baselines.lora
        self.layers = ffn_layers(lm, self.settings.layers, self.settings.ffn)

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """Epochs of Adam over the facts; ends early once the model gives every answer."""
        factors = self.start(lm)
        leaves = [leaf for part in factors.values() for leaf in (part.down, part.up)]
        self.fit(lm, facts, factors, torch.optim.Adam(leaves, lr=self.settings.lr, fused=False))
        return PlainEdit(finite({name: part.shift() for name, part in factors.items()}))

    def start(self, lm: LanguageModel) -> dict[str, Factors]:
        """Factors that change nothing yet, drawn by the seed."""
        rng, rank = torch.Generator().manual_seed(self.config.seed), self.settings.rank
        weights = {layer: lm.model.get_submodule(layer.name).get_parameter("weight") for layer in self.layers}
        return {
            layer.name: Factors.at_start(layer, weight, rank, self.settings.alpha / rank, rng)
            for layer, weight in weights.items()
        }

    def fit(
        self, lm: LanguageModel, facts: Sequence[Fact], factors: dict[str, Factors], optimizer: torch.optim.Optimizer
    ) -> int:
        """Train the factors in place, in an order of facts that the seed fixes; the number of epochs."""
        require_facts(facts)
        encoder, budget = fact_encoder(lm, self.config.data), self.config.batch.token_budget
        encoded = [encoder.encode(fact) for fact in facts]
        everything = [batch.to(lm.device) for batch in make_batches(encoded, budget, lm.pad_id)]
        with low_rank(lm, factors):
            for epoch in range(self.settings.epochs):
                order = random.Random(f"lora/{self.config.seed}/{epoch}").sample(encoded, len(encoded))
                for first in range(0, len(order), self.settings.batch_facts):
                    step = order[first : first + self.settings.batch_facts]
                    optimizer.zero_grad(set_to_none=True)
                    for batch in make_batches(step, budget, lm.pad_id):
                        batch = batch.to(lm.device)
                        loss: Any = nll(lm.log_probs(batch), batch.targets) / len(step)
                        loss.backward()
                    optimizer.step()
                if self.settings.stop_early and _all_hold(lm, everything):
                    return epoch + 1
        return self.settings.epochs


@torch.no_grad()
def _all_hold(lm: LanguageModel, batches: Sequence[TokenBatch]) -> bool:
    """Whether every token of every answer is the most probable one, given the answer before it."""
    return all(bool((lm.logits(batch).argmax(-1) == batch.targets).all()) for batch in batches)
