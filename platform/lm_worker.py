"""The language model of one Ray Train rank: frozen, whole or a part of it, tracing and measuring its share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.data.sampling import Sampler, preserved_facts
from malmen.data.splits import training_records
from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.errors import EditError
from malmen.evaluate import Evaluation, evaluate, predict_batches
from malmen.lm.key_moments import KeySums, layers_at_once
from malmen.lm.layers import find_layers
from malmen.lm.model import fact_encoder, load_lm
from malmen.lm.trace import Traces, trace_facts
from malmen.meta import MetaBatch, check_finite, leaf_grads, make_leaves, meta_backward
from malmen.platform.cluster import on_own_device
from malmen.platform.hypernet_group import HypernetLost
from malmen.platform.sharding import load_sharded_lm

T = TypeVar("T")


class LMWorker:
    """One rank. Under ZeRO-3 all ranks must run the same forwards in the same order, whatever their shares are."""

    def __init__(self, config: Config, world_rank: int, world_size: int, note: Callable[[str], None]) -> None:
        self.config, self.world_rank, self.world_size, self.note = config, world_rank, world_size, note
        note("loading the language model")
        self.sharded = config.lm.sharding == "zero3"
        model = on_own_device(config.model)
        self.lm = load_sharded_lm(model) if self.sharded else load_lm(model)
        self.layers = find_layers(self.lm.model, config.editor.layers, config.editor.ffn)
        self.encoder = fact_encoder(self.lm, config.data)
        self.sampler = Sampler(config, self.encoder, training_records(config))
        self.sampler.check_lengths()
        self.spare = self.sampler.batch(0).edits[0]
        self.fingerprint = self.lm.fingerprint()
        self.caches = self.sampler.caches(self.fingerprint, self.lm.dtype)

    @property
    def shift_dtype(self) -> str:
        """In which shifts travel: what the leaves of stage (iv) have."""
        return str(torch.promote_types(self.lm.dtype, torch.float32)).removeprefix("torch.")

    def trace(self, facts: Sequence[EncodedFact], *, role: str = "edits") -> Traces:
        """(i)–(ii) Keys and value gradients of this rank's share of the edits."""
        tokens = self.config.editor.tokens
        return trace_facts(self.lm, self.layers, self._share(facts), tokens, self._cut, self.caches.get(role))

    def key_moments(self) -> Iterator[dict[str, Tensor]]:
        """E[u uᵀ] of the keys that edits are to leave alone, some layers at a time; each rank reads its share."""
        facts = preserved_facts(self.config, self.sampler.records(0))
        batches = self._cut(self._share([self.encoder.encode(fact) for fact in facts]))
        for part in layers_at_once(self.layers):
            sums = KeySums(self.lm, part)
            for batch in batches:
                sums.read(batch)
            for layer in part:
                self._sum(sums.sums[layer.name])
                self._sum(sums.counts[layer.name])
            yield sums.moments()

    def meta_backward(
        self, step: int, batch: MetaBatch, shifts: Mapping[str, Tensor]
    ) -> tuple[tuple[float, float], dict[str, Tensor]]:
        """(iv) The meta loss over all ranks, and its gradient for the layers that this rank sends on."""
        coef = self.config.training.locality_coef
        leaves = make_leaves(self.lm, shifts)
        mine = MetaBatch((), self._share(batch.equivalents), self._share(batch.unrelated))
        scales = (1 / max(1, len(batch.equivalents)), 1 / max(1, len(batch.unrelated)))
        losses = meta_backward(self.lm, self.layers, leaves, mine, scales, coef, self._cut, self.caches)
        grads = leaf_grads(leaves)
        generalization, locality = self._sum(torch.tensor(losses, dtype=torch.float64)).tolist()
        for grad in grads.values():
            self._sum(grad)
        check_finite(generalization + coef * locality, grads, step, batch)
        sent = list(grads)[self.world_rank :: self.world_size]
        return (generalization, locality), {name: grads[name] for name in sent}

    def evaluate(self, records: Sequence[EditRecord], shifts: Mapping[str, Tensor], residual: float) -> Evaluation:
        """ES, GS and LS of an edit, teacher-forced; every rank asks about its share and learns of all."""
        on_device = {name: shift.to(self.lm.device) for name, shift in shifts.items()}
        return evaluate(
            self.lm, records, on_device, self.config, generate=False, residual=residual, predict=self._predict
        )

    # --- the ranks together ---------------------------------------------------------------------------------

    @contextmanager
    def together(self, doing: str, seconds: dict[str, float] | None = None, stage: str = "") -> Iterator[None]:
        """What all ranks ask of the actors. If it fails for one of them, it fails for all."""
        self.note(doing)
        begin = time.perf_counter()
        failure: HypernetLost | EditError | None = None
        try:
            yield
        except (HypernetLost, EditError) as error:
            failure = error
        failures = [found for found in self.gather(failure) if found is not None]
        if seconds is not None:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin
        for found in sorted(failures, key=lambda found: isinstance(found, HypernetLost)):
            raise found

    def gather(self, value: T) -> list[T]:
        """Every rank's value, everywhere."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            there = tensor.to(self.lm.device)
            dist.all_reduce(there)
            tensor.copy_(there)
        return tensor

    # --- shares ------------------------------------------------------------------------------------------------

    def _share(self, things: Sequence[T]) -> list[T]:
        """Consecutive ones, so that the shares one after the other are the whole."""
        first = len(things) * self.world_rank // self.world_size
        return list(things[first : len(things) * (self.world_rank + 1) // self.world_size])

    def _cut(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        """Micro-batches; under ZeRO-3 as many as on the rank that has most."""
        batches = make_batches(facts, self.config.batch.token_budget, self.lm.pad_id)
        if not self.sharded or self.world_size == 1:
            return batches
        missing = max(self.gather(len(batches))) - len(batches)
        (spare,) = make_batches([self.spare], self.config.batch.token_budget, self.lm.pad_id)
        return batches + [replace(spare, counts=False)] * missing

    def _predict(self, facts: Sequence[EncodedFact]) -> list[list[int]]:
        mine = self._share(facts)
        return [row for rows in self.gather(predict_batches(self.lm, len(mine), self._cut(mine))) for row in rows]
