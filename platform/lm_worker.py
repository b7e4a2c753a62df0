"""The language model of one Ray Train rank: frozen, whole or sharded, with its share of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.data.tokens import EncodedFact, MetaBatch, TokenBatch
from malmen.errors import EditError
from malmen.evaluate import Evaluation, evaluate, predict_batches
from malmen.lm.layers import edited_layers
from malmen.lm.model import fact_encoder, load_lm
from malmen.lm.own_text import Writers
from malmen.lm_side import LMSide, MetaLosses
from malmen.platform.cluster import on_own_device
from malmen.platform.hypernet_group import HypernetLost
from malmen.platform.sharding import load_sharded_lm
from malmen.training import make_sampler

T = TypeVar("T")


class LMWorker(LMSide):
    """One rank. Under ZeRO-3 all ranks must run the same forwards in the same order, whatever their shares are."""

    def __init__(self, config: Config, world_rank: int, world_size: int, note: Callable[[str], None]) -> None:
        self.world_rank, self.world_size, self.note = world_rank, world_size, note
        note("loading the language model")
        self.sharded = config.lm.sharding == "zero3"
        model = on_own_device(config.model)
        lm = load_sharded_lm(model) if self.sharded else load_lm(model)
        if len(dtypes := {str(dtype) for dtype in self.gather(lm.dtype)}) > 1:
            raise EditError(f"model.dtype=auto is {' and '.join(sorted(dtypes))} on different nodes: set model.dtype")
        self.encoder = fact_encoder(lm, config.data)
        mine = slice(None) if self.sharded else slice(world_rank, None, world_size)
        self.sampler = make_sampler(lm, config, note, Writers(mine, self.gather, world_rank == 0))
        self.sampler.check_lengths()
        self.spare = self.sampler.batch(0).edits[0]  # what a rank runs that has fewer micro-batches than another
        self.fingerprint = lm.fingerprint()
        layers = edited_layers(lm.model, config.editor)
        super().__init__(lm, layers, config, self.sampler.caches(self.fingerprint, lm.dtype))

    @property
    def shift_dtype(self) -> str:
        """The type in which shifts travel: that of the leaves of stage (iv)."""
        return str(torch.promote_types(self.lm.dtype, torch.float32)).removeprefix("torch.")

    def meta_backward(
        self, step: int, batch: MetaBatch, shifts: Mapping[str, Tensor]
    ) -> tuple[MetaLosses, dict[str, Tensor]]:
        """(iv) The meta loss over all ranks, and its gradient for the layers that this rank sends on."""
        losses, grads = super().meta_backward(step, batch, shifts)
        sent = list(grads)[self.world_rank :: self.world_size]
        return losses, {name: grads[name] for name in sent}

    def evaluate(
        self, records: Sequence[EditRecord], shifts: Mapping[str, Tensor], residual: float | None
    ) -> Evaluation:
        """ES, GS and LS of an edit, teacher-forced; every rank predicts its share and has the scores of all."""
        on_device = {name: shift.to(self.lm.device) for name, shift in shifts.items()}
        return evaluate(
            self.lm, records, on_device, self.config, generate=False, residual=residual, predict=self._predict
        )

    # --- the ranks together ---------------------------------------------------------------------------------

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A request of all ranks to the actors: if it fails on one rank, it fails on all."""
        self.note(doing)
        mine: HypernetLost | EditError | None = None
        try:
            yield
        except (HypernetLost, EditError) as error:
            mine = error
        failures = [failure for failure in self.gather(mine) if failure is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, HypernetLost)):  # a lost actor last
            raise failure

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor with its sum over all ranks in it."""
        if self.world_size > 1:
            on_device = tensor.to(self.lm.device)
            dist.all_reduce(on_device)
            tensor.copy_(on_device)
        return tensor

    # --- shares ------------------------------------------------------------------------------------------------

    def share(self, facts: Sequence[EncodedFact]) -> Sequence[EncodedFact]:
        """Consecutive facts: the shares of all ranks, one after the other, are the whole list."""
        first = len(facts) * self.world_rank // self.world_size
        return facts[first : len(facts) * (self.world_rank + 1) // self.world_size]

    def cut(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        """Micro-batches; under ZeRO-3 as many as on the rank that has most."""
        batches = super().cut(facts)
        if not self.sharded or self.world_size == 1:
            return batches
        missing = max(self.gather(len(batches))) - len(batches)
        (spare,) = super().cut([self.spare])
        return batches + [replace(spare, counts=False)] * missing

    def _predict(self, facts: Sequence[EncodedFact]) -> list[list[int]]:
        mine = self.share(facts)
        return [row for rows in self.gather(predict_batches(self.lm, len(mine), self.cut(mine))) for row in rows]
