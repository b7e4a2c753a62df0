"""FT: AdamW on the weights of a few FFNs, on nothing but the facts (appendix, "Editing Models by Fine-tuning")."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.tokens import make_batches
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import finite, require_facts
from malmen.errors import EditError
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.losses import nll
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import edited, upright_weight


class FineTune(UntrainedMethod):
    """Tunes copies of the weights: the LM stays as it is, and the difference is the edit."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        self.config, self.settings = config, config.baselines.ft
        self.layers = ffn_layers(lm, self.settings.layers, self.settings.ffn)

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """Epochs of AdamW over the facts, in an order that the seed fixes."""
        require_facts(facts)
        encoder = fact_encoder(lm, self.config.data)
        encoded = [encoder.encode(fact) for fact in facts]
        frozen = {layer.name: _full_weight(lm, layer.name) for layer in self.layers}
        weights = {name: weight.clone().requires_grad_() for name, weight in frozen.items()}
        optimizer = torch.optim.AdamW(
            weights.values(), lr=self.settings.lr, weight_decay=self.settings.weight_decay, fused=False
        )
        for epoch in range(self.settings.epochs):
            order = random.Random(f"ft/{self.config.seed}/{epoch}").sample(encoded, len(encoded))
            for first in range(0, len(order), self.settings.batch_facts):
                step = order[first : first + self.settings.batch_facts]
                optimizer.zero_grad(set_to_none=True)
                for batch in make_batches(step, self.config.batch.token_budget, lm.pad_id):
                    batch = batch.to(lm.device)
                    with edited(lm, {name: weight - frozen[name] for name, weight in weights.items()}):
                        loss = nll(lm.log_probs(batch), batch.targets) / len(step)
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return PlainEdit(finite({name: (weights[name].detach() - frozen[name]).double() for name in weights}))


def ffn_layers(lm: LanguageModel, layers: str | Sequence[str], ffn: str) -> list[LayerSpec]:
    """The layers of a rule or of a list of names; with `both`, a rule means both linears of each FFN."""
    ways = ("first", "second") if ffn == "both" else (ffn,)
    of_each_way = [layer for way in ways for layer in find_layers(lm.model, layers, way)]
    return list(dict.fromkeys(of_each_way))  # layers that are named are found either way


def _full_weight(lm: LanguageModel, name: str) -> Tensor:
    weight = upright_weight(lm.model.get_submodule(name))
    if weight.numel() == 0:
        raise EditError(f"fine-tuning needs the full weight of {name}, but the model is sharded")
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
