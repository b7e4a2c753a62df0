"""What an LM worker needs: its weights, and a rehearsal of its largest micro-batches on torch's meta device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from malmen.config import Config, ModelConfig
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.lm.hooks import replaced_forward
from malmen.lm.layers import LayerSpec, edited_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import Overlay
from malmen.lm.stem import stem_blocks
from malmen.lm_side import LMSide
from malmen.platform.plan.data import StepFacts, count_traced
from malmen.platform.plan.meter import Cost, Meter, total_bytes
from malmen.platform.plan.shapes import find_skeleton

_LIVE = 10**9  # parameters that DeepSpeed keeps gathered at most (stage3_max_live_parameters, its default)
_READERS = 4  # threads of transformers that read weights
_SAMPLE = 256  # facts that are put into micro-batches, at least: more only make more of the same


@dataclass(frozen=True)
class PlannedLM:
    """The language model without numbers, and its edited layers."""

    lm: LanguageModel
    layers: list[LayerSpec]
    source: str  # where the shape comes from

    @property
    def num_parameters(self) -> int:
        """Of the whole model; tied ones count once."""
        return sum(parameter.numel() for parameter in self.lm.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, buffers included."""
        return total_bytes([*self.lm.model.parameters(), *self.lm.model.buffers()])

    def gathered_bytes(self) -> int:
        """Under ZeRO-3, whole weights at one time: DeepSpeed's limit, or the largest single one if that is more."""
        largest = max(parameter.numel() for parameter in self.lm.model.parameters())
        return min(self.num_parameters, max(_LIVE, largest)) * self.lm.dtype.itemsize

    def loading_bytes(self, model: ModelConfig) -> int:
        """What is in the host's memory at once while weights go to a card: some of them, as read and in their new type;
        but all of a GGUF file, which transformers unpacks into float32 first."""
        if model.name.endswith(".gguf"):
            return 4 * self.num_parameters
        sharded = any(hasattr(parameter, "ds_id") for parameter in self.lm.model.parameters())
        return (1 if sharded else _READERS) * 2 * max(parameter.nbytes for parameter in self.lm.model.parameters())

    @property
    def edited_bytes(self) -> int:
        """The weights of the edited layers."""
        return sum(layer.key_size * layer.value_size for layer in self.layers) * self.lm.dtype.itemsize

    @property
    def shift_bytes(self) -> int:
        """All shifts in float32 at least, as they travel and as leaves."""
        dtype = self.lm.dtype
        return self.edited_bytes // dtype.itemsize * torch.promote_types(dtype, torch.float32).itemsize

    def feature_bytes(self, facts: Sequence[EncodedFact], tokens: str) -> int:
        """Keys and value gradients of these edits in all layers."""
        counts = count_traced(self.layers, facts, tokens)
        values = sum((layer.key_size + layer.value_size) * counts[layer.name] for layer in self.layers)
        return self.lm.dtype.itemsize * values


@dataclass
class RehearsedLM:
    """One LM worker's share of a step."""

    trace_peak: int = 0  # bytes held beside the weights while a micro-batch is traced
    meta_peak: int = 0  # the same while its meta loss is back-propagated, shifts and their gradients included
    small_peak: int = 0  # the part of both that the allocator may keep
    micro_batches: int = 0
    largest: tuple[int, int] = (0, 0)  # facts and width of the largest micro-batch
    costs: dict[str, Cost] = field(default_factory=dict)  # by stage, of all micro-batches


def plan_lm(config: Config, dtype: torch.dtype) -> PlannedLM:
    """The model's skeleton in the type that it will have."""
    model, kind, source = find_skeleton(config.model)
    lm = LanguageModel(model.to(dtype), None, kind)
    if config.lm.sharding == "zero3":
        for parameter in model.parameters():
            cast(Any, parameter).ds_id = 0  # as DeepSpeed marks it: an overlay must not ask for the whole weight
    return PlannedLM(lm, edited_layers(model, config.editor), source)


def cache_bytes(config: Config, planned: PlannedLM, facts: StepFacts) -> int:
    """Bytes of the cache: all results of the facts that recur, up to its budget."""
    if config.batch.cache_dir is not None:  # on disk
        return 0
    lm, needed = planned.lm, 0.0
    hidden = int(cast(Any, lm.model).config.hidden_size) * lm.dtype.itemsize
    states = {"equivalents": 1, "unrelated": 2} if lm.kind != "encoder-decoder" else {}
    for kind in facts.recurring(config):
        tokens = facts.recurring_tokens(config, kind)
        needed += tokens * hidden * states.get(kind, 0)
        if kind == "edits":
            step = planned.feature_bytes(facts.edits, config.editor.tokens)
            needed += step * tokens / sum(fact.length for fact in facts.edits)
    return min(config.batch.cache_mb * 2**20, round(needed / config.cluster.lm_workers))


def rehearse_lm(config: Config, planned: PlannedLM, facts: StepFacts, device: str = "cpu") -> RehearsedLM:
    """Trace and meta loss of one worker, with the largest micro-batch of each kind of facts."""
    lm, layers, rehearsed = planned.lm, planned.layers, RehearsedLM()
    meter = Meter(*lm.model.parameters(), *lm.model.buffers())
    side = _RehearsedSide(config, planned, meter, rehearsed)
    with ExitStack() as undo:
        for stack, count in stem_blocks(lm, layers).items():
            blocks = cast(nn.ModuleList, lm.model.get_submodule(lm.stacks[stack]))
            undo.enter_context(replaced_forward(_as_one(blocks[:count], meter)))
        with meter.stage(rehearsed.costs, "trace"):
            side.trace(facts.edits)
        rehearsed.trace_peak, meter.peak = meter.peak, meter.held
        with meter if device == "cpu" else nullcontext():  # they come from the actors into the host's memory
            shifts = {layer.name: torch.empty(layer.value_size, layer.key_size, device="meta") for layer in layers}
        with meter:
            edit = Overlay.of_leaves(lm, shifts)
        with meter.stage(rehearsed.costs, "meta_loss"):
            side.generalization_backward(edit, facts.equivalents)
        with meter.stage(rehearsed.costs, "meta_loss"):
            side.locality_backward(edit, facts.unrelated)
    rehearsed.meta_peak, rehearsed.small_peak = meter.peak, meter.small_peak
    return rehearsed


class _RehearsedSide(LMSide):
    """An LM worker's work without numbers. Of its micro-batches the largest runs, and counts for all."""

    def __init__(self, config: Config, planned: PlannedLM, meter: Meter, rehearsed: RehearsedLM) -> None:
        super().__init__(planned.lm, planned.layers, config)
        self.meter, self.rehearsed = meter, rehearsed

    def share(self, facts: Sequence[EncodedFact]) -> Sequence[EncodedFact]:
        """The largest that a worker has."""
        return facts[: -(-len(facts) // self.config.cluster.lm_workers)]

    def cut(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        """The largest micro-batch; the meter's weight is how many of its size all facts amount to."""
        if not facts:
            return []
        budget = self.config.batch.token_budget
        sample = facts[: max(_SAMPLE, 4 * budget // min(fact.length for fact in facts))]
        batches, more = make_batches(sample, budget, 0), len(facts) / len(sample)
        sizes = [sum(mask.numel() for mask in batch.masks.values()) for batch in batches]
        largest = batches[sizes.index(max(sizes))]
        self.meter.weight = more * sum(sizes) / max(sizes)
        self.rehearsed.micro_batches += round(len(batches) * more)
        shape = (len(largest.facts), sum(mask.shape[1] for mask in largest.masks.values()))
        self.rehearsed.largest = max(self.rehearsed.largest, shape, key=math.prod)
        return [largest]


def _as_one(blocks: nn.ModuleList, meter: Meter) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Forwards for blocks that are alike: the first runs and counts for all, the others hand on what it gave."""
    forward = blocks[0].forward
    outputs: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        meter.weight *= len(blocks)
        outputs[:] = [forward(*args, **kwargs)]
        meter.weight /= len(blocks)
        return outputs[0]

    yield blocks[0], run
    for block in blocks[1:]:
        yield block, lambda *_, **__: outputs[0]
