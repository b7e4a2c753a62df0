"""The language model's side of a meta-training step: stages (i), (ii) and (iv) of Fig. 3.

Everything is a sum over facts, so it is computed in micro-batches, and may be shared by several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.tokens import EncodedFact, MetaBatch, PreservedKeys, TokenBatch, make_batches
from malmen.errors import EditError
from malmen.lm.answer_rows import answers_only
from malmen.lm.devices import release_freed_memory
from malmen.lm.key_moments import KeySums, layers_at_once
from malmen.lm.layers import LayerSpec
from malmen.lm.losses import kl, nll
from malmen.lm.overlay import Overlay, edited
from malmen.lm.stem import (
    Height,
    Stem,
    all_blocks,
    cache_kinds,
    fill_or_resume,
    recall_stem,
    remember_stem,
    stem_blocks,
)
from malmen.lm.trace import LayerTrace, Traces, trace
from malmen.runs.fact_cache import FactCache

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

_PAIRS_AT_ONCE = 256  # whose keys are held together
_DUAL_RATE = 0.03  # of log λ_loc, per step and factor e of KL over its target
Caches = Mapping[str, FactCache]  # by kind of fact (edits, equivalents, unrelated), for kinds whose facts recur


class MetaLosses(NamedTuple):
    """The two parts of the meta loss of eq. 1, each a mean over the facts of a step."""

    generalization: float
    locality: float


class LMSide:
    """A frozen language model that traces edits and back-propagates the meta loss.

    As it is, it has all facts of a step. A process that shares them with others overrides `share`, `cut` and `sum`.
    """

    def __init__(
        self, lm: LanguageModel, layers: Sequence[LayerSpec], config: Config, caches: Caches | None = None
    ) -> None:
        self.lm, self.layers, self.config = lm, list(layers), config
        self.caches: Caches = caches or {}
        self.locality_coef = config.training.locality_coef  # λ_loc of the next step

    # --- what processes that share the work do differently ---------------------------------------------------

    def share(self, facts: Sequence[EncodedFact]) -> Sequence[EncodedFact]:
        """The facts that are this process's own."""
        return facts

    def cut(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        """Micro-batches within the token budget."""
        return make_batches(facts, self.config.batch.token_budget, self.lm.pad_id)

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor with its sum over all processes in it."""
        return tensor

    # --- (i)–(ii) ----------------------------------------------------------------------------------------------

    def trace(self, facts: Sequence[EncodedFact], *, cached: bool = True) -> Traces:
        """Keys and value gradients of this process's share of the edits, in their order. What the cache of edits knows
        is not computed again; `cached=False` is for facts that do not recur."""
        lm, tokens, mine = self.lm, self.config.editor.tokens, self.share(facts)
        cache = self.caches.get("edits") if cached else None
        if cache is None:
            return trace(lm, self.layers, self.cut(mine), tokens)
        names = {layer.name: _trace_names(layer, tokens) for layer in self.layers}
        known, fresh = cache.split([name for pair in names.values() for name in pair], mine)
        traces = trace(lm, self.layers, self.cut([fact for _, fact in fresh]), tokens)
        rows: dict[int, dict[str, Tensor]] = {place: {} for place in range(len(mine))}
        for layer in self.layers:
            counts = [fact.num_traced(layer.stack, tokens) for _, fact in fresh]
            for name, part in zip(names[layer.name], traces[layer.name], strict=True):
                for (place, _), fact_rows in zip(fresh, part.split(counts), strict=True):
                    rows[place][name] = fact_rows
                for place, fact in known:
                    rows[place][name] = cache.get(name, fact).to(lm.device)
        for place, fact in fresh:
            cache.put(fact, rows[place])
        if not rows:
            return traces
        return {
            layer: LayerTrace(*(torch.cat([rows[place][name] for place in sorted(rows)]) for name in pair))
            for layer, pair in names.items()
        }

    # --- (iv) ------------------------------------------------------------------------------------------------------

    def meta_backward(
        self, step: int, batch: MetaBatch, shifts: Mapping[str, Tensor]
    ) -> tuple[MetaLosses, dict[str, Tensor]]:
        """L_gen and L_loc of the model edited by these shifts, and ∇_W̃ of L_gen + λ_loc·L_loc by layer, over all
        processes. EditError with step, layers and records where they are not finite."""
        edit = Overlay.of_leaves(self.lm, shifts)
        mine = (
            self.generalization_backward(edit, batch.equivalents),
            self.locality_backward(edit, batch.unrelated),
        )
        collected = edit.grads()
        grads = {name: self.sum(collected[name].to(self.lm.device)) for name in shifts}  # in this order everywhere
        losses = MetaLosses(*self.sum(torch.tensor(mine, dtype=torch.float64)).tolist())
        self._check_finite(losses, grads, step, batch)
        return losses, grads

    def meta_loss(self, losses: MetaLosses) -> float:
        """L_gen + λ_loc·L_loc."""
        return losses.generalization + self.locality_coef * losses.locality

    def adjust_locality_coef(self, losses: MetaLosses, batch: MetaBatch) -> None:
        """Where `training.locality_target` is set, a step of dual ascent on log λ_loc, at the end of a step."""
        target, tokens = self.config.training.locality_target, sum(len(fact.targets) for fact in batch.unrelated)
        if target is None or not tokens:
            return
        excess = math.log(max(losses.locality * len(batch.unrelated) / tokens, 1e-12) / target)
        self.locality_coef *= math.exp(_DUAL_RATE * min(1.0, max(-1.0, excess)))

    def generalization_backward(self, edit: Overlay, facts: Sequence[EncodedFact]) -> float:
        """This process's part of L_gen over `facts`; adds its gradient to the edit's tensors."""
        total, scale = 0.0, 1 / max(1, len(facts))
        height = stem_blocks(self.lm, self.layers) if "equivalents" in self.caches else {}
        for batch, (stem,) in self._with_stems("equivalents", facts, [height]):
            with edited(self.lm, edit), fill_or_resume(self.lm, stem), answers_only(self.lm, batch):
                loss = nll(self.lm.log_probs(batch), batch.targets) * (scale if batch.counts else 0.0)
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def locality_backward(self, edit: Overlay, facts: Sequence[EncodedFact]) -> float:
        """This process's part of L_loc over `facts`; adds λ_loc times its gradient to the edit's.

        What lies below every edit is computed once for both forwards. Of a fact in the cache the unedited model runs
        its final norm and head only.
        """
        total, scale, coef = 0.0, 1 / max(1, len(facts)), self.locality_coef
        heights = [stem_blocks(self.lm, self.layers), all_blocks(self.lm) if "unrelated" in self.caches else {}]
        for batch, (stem, top) in self._with_stems("unrelated", facts, heights):
            loss = self._drift(edit, batch, stem, top) * (scale if batch.counts else 0.0)
            if coef > 0:
                (coef * loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _drift(self, edit: Overlay, batch: TokenBatch, stem: Stem, top: Stem) -> Tensor:
        """Σ KL of the edited model from the reference; what each computes over the vocabulary ends with the loss."""
        reference = self.reference(batch, stem, top)
        with edited(self.lm, edit), fill_or_resume(self.lm, stem), answers_only(self.lm, batch):
            return kl(reference, self.lm.log_probs(batch))

    @torch.no_grad()
    def reference(self, batch: TokenBatch, stem: Stem, top: Stem) -> Tensor:
        """log p (tokens, vocabulary) of the model that L_loc compares with: the unedited one."""
        with fill_or_resume(self.lm, stem), fill_or_resume(self.lm, top), answers_only(self.lm, batch):
            return self.lm.log_probs(batch)

    def _with_stems(
        self, kind: str, facts: Sequence[EncodedFact], heights: Sequence[Height]
    ) -> Iterator[tuple[TokenBatch, list[Stem]]]:
        """Micro-batches of this process's share with their stems: full where the cache knows the facts, else empty, and
        put into the cache once they were filled."""
        cache, fresh = self.caches.get(kind), list(self.share(facts))
        known: list[EncodedFact] = []
        if cache is not None:
            pairs = cache.split(cache_kinds(self.lm, *heights), fresh)
            known, fresh = ([fact for _, fact in part] for part in pairs)
        for number, batch in enumerate(self.cut(fresh)):
            if number:
                release_freed_memory()  # micro-batches of many shapes fragment the heap
            batch, stems = batch.to(self.lm.device), [Stem(height) for height in heights]
            yield batch, stems
            if cache is not None:
                remember_stem(cache, self.lm, batch, fresh, stems)
        for batch in self.cut(known):
            batch = batch.to(self.lm.device)
            assert cache is not None
            yield batch, [recall_stem(cache, self.lm, batch, known, height) for height in heights]

    def _check_finite(self, losses: MetaLosses, grads: Mapping[str, Tensor], step: int, batch: MetaBatch) -> None:
        meta_loss = self.meta_loss(losses)
        broken = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        if not math.isfinite(meta_loss) or broken:
            where = f"; the gradient is not finite in {', '.join(broken)}" if broken else ""
            raise EditError(f"step {step}: the meta loss is {meta_loss}{where}{records_of(batch)}")

    # --- before the first step -------------------------------------------------------------------------------------

    def preserved_moments(self, keys: PreservedKeys) -> Iterator[dict[str, Tensor]]:
        """E[u uᵀ] by layer (terms, key, key) for each of `config.editor.preserved_terms`. It comes in as many layers at
        a time as fit into memory."""
        terms, unrelated = self.config.editor.preserved_terms, self.cut(self.share(keys.unrelated))
        for part in layers_at_once(self.layers, len(terms)):
            moments = []
            for term in terms:
                sums = KeySums(self.lm, part)
                if term == "unrelated":
                    for batch in unrelated:
                        sums.read(batch)
                else:
                    for first in range(0, len(keys.phrasings), _PAIRS_AT_ONCE):
                        pairs = keys.phrasings[first : first + _PAIRS_AT_ONCE]
                        sums.read_differences(*(self.cut(self.share(facts)) for facts in zip(*pairs, strict=True)))
                for layer in part:
                    self.sum(sums.sums[layer.name])
                    self.sum(sums.counts[layer.name])
                moments.append(sums.moments())
            yield {layer.name: torch.stack([by_layer[layer.name] for by_layer in moments]) for layer in part}


def records_of(batch: MetaBatch) -> str:
    """The end of an error message: which records a step had."""
    return f"; the records were {', '.join(batch.record_ids[:5])} … ({len(batch.edits)} edits)"


def _trace_names(layer: LayerSpec, tokens: str) -> tuple[str, str]:
    """What the cache calls a layer's keys and value gradients."""
    return f"keys/{tokens}/{layer.name}", f"value_grads/{tokens}/{layer.name}"
