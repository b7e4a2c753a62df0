"""The memory of an LM worker and of a hypernet actor at their peaks, item by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from malmen.config import Config
from malmen.lm.key_moments import layers_at_once, sums_bytes
from malmen.platform.plan.data import StepFacts
from malmen.platform.plan.hypernet import RehearsedHypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM, cache_bytes

MB, GB = 2**20, 2**30

# Measured, see docs/plan.md: python, torch, ray and, in an LM worker, transformers, before any model is loaded.
_LM_WORKER, _HYPERNET_ACTOR = 590 * MB, 400 * MB
_DEEPSPEED = 100 * MB  # what DeepSpeed adds to it
_HOARDED = 0.75  # share of the blocks up to the mmap threshold that glibc keeps beyond those in use
_LONG_RUN = 60 * MB  # what it keeps in every long run
_RECORD, _FACT = 5500, 500  # bytes of a parsed record and of an encoded fact

# Assumed, not measured: CUDA's context and workspaces, and the share of its memory that the allocator leaves unused.
_CUDA = GB
_FRAGMENTS = 0.1

# Items of an LM worker that change with the time of a step.
_TRACES, _SHIFTS = "traces of its edits", "shifts and their gradients"
_MERGED, _MOMENTS = "W + S, or S in the LM's type", "moments of the keys to preserve, before the first step"


@dataclass
class Role:
    """One process of a role."""

    name: str
    processes: int
    device: str  # cpu or cuda
    items: dict[str, int]  # bytes by what a process holds at its peak
    limit: int = 0  # bytes that it may have

    @property
    def total(self) -> int:
        """At the peak."""
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        """Whether the limit is enough."""
        return self.total <= self.limit


def lm_role(config: Config, planned: PlannedLM, facts: StepFacts, rehearsed: RehearsedLM, device: str) -> Role:
    """An LM worker at its peak: in the meta loss, or tracing the next step while it holds the shifts of this. Traces
    end when they are sent."""
    workers, overlap, sharded = config.cluster.lm_workers, bool(config.cluster.overlap), config.lm.sharding == "zero3"
    shifts, features = planned.shift_bytes, planned.feature_bytes(facts.edits, config.editor.tokens) // workers
    received = 1 if device == "cpu" else 0  # shifts as they arrive; with a GPU they are in the host's memory
    ahead = shifts * (received + 1) * overlap  # shifts and gradients of the step before, while the next one is traced
    ordered = 2 * features // len(planned.layers)  # one layer's rows, joined and in order
    peaks: list[tuple[int, dict[str, int]]] = [  # in the meta loss, while tracing, while the traces are put in order
        (rehearsed.meta_peak, {_SHIFTS: shifts * (received + 2), _MERGED: planned.edited_bytes}),
        (rehearsed.trace_peak + features + ahead, {_TRACES: features, _SHIFTS: ahead}),
        (features + ordered + ahead, {_TRACES: features + ordered, _SHIFTS: ahead}),
    ]
    if config.editor.preserving:  # read before the first step; a forward holds less than tracing does
        sums = max(sums_bytes(part) for part in layers_at_once(planned.layers))
        peaks.append((rehearsed.trace_peak + sums, {_MOMENTS: sums}))
    total, held = max(peaks, key=lambda peak: peak[0])
    items = {
        "weights" + (f", 1/{workers}" if sharded else ""): planned.weight_bytes / (workers if sharded else 1),
        "whole weights gathered at once": planned.gathered_bytes() if sharded else 0,
        **held,
        "activations and logits of a micro-batch": total - sum(held.values()),
        "cache of what recurs": cache_bytes(config, planned, facts),
    }
    if device == "cpu":
        items["records and their tokens"] = facts.num_records * _RECORD + _num_encoded(config, facts) * _FACT
    process = {"python, torch, ray, transformers": _LM_WORKER + _DEEPSPEED * sharded}
    pages = 2 * shifts + (1 + overlap) * features
    return Role("LM worker", workers, device, _items(device, process, items, pages, rehearsed.small_peak, total))


def hypernet_role(config: Config, rehearsed: RehearsedHypernet, device: str) -> Role:
    """A hyper-network actor at its peak: solving, or back-propagating."""
    held = {
        "keys and value gradients": rehearsed.features,
        "value_diffs": rehearsed.value_diffs,
        f"factors ({' and '.join(sorted(rehearsed.forms))})": rehearsed.kept,
        "shifts in float64": rehearsed.shifts,
    }
    if rehearsed.backward_peak >= rehearsed.solve_peak:  # which uses up the factors
        held = {item: size for item, size in held.items() if not item.startswith("factors")} | {
            "shift gradients": rehearsed.shift_grads,
            "pullbacks": rehearsed.pullbacks,
            "gradient of θ": rehearsed.theta,
        }
    moments = ", moments of the keys to preserve" if config.editor.preserving else ""
    items = {
        "θ": rehearsed.theta,
        "Adam": rehearsed.adam,
        f"normalisers{moments}": rehearsed.norms,
        **held,
        f"activations of {config.batch.hypernet_rows} rows, temporaries": rehearsed.peak - sum(held.values()),
    }
    process = {"python, torch, ray": _HYPERNET_ACTOR}
    pages = (1 + bool(config.cluster.overlap)) * rehearsed.features + 2 * rehearsed.shift_grads
    items = _items(device, process, items, pages, rehearsed.small_peak, rehearsed.peak)
    return Role("hypernet actor", config.cluster.hypernet_actors, device, items)


def _items(
    device: str, process: Mapping[str, int], tensors: Mapping[str, float], pages: int, small: int, peak: int
) -> dict[str, int]:
    """The tensors with what the process and the allocator add to them; `pages` are of Ray's object store."""
    if device == "cpu":
        kept = {"pages of Ray's object store": pages, "freed, but kept by glibc": _HOARDED * small + _LONG_RUN}
        items = {**process, **tensors, **kept}
    else:
        items = {"CUDA (assumed)": _CUDA, **tensors, "fragments (assumed)": _FRAGMENTS * peak}
    return {name: round(size) for name, size in items.items() if size > 0}


def _num_encoded(config: Config, facts: StepFacts) -> float:
    """Facts that the run will have encoded at its end: each that it draws is kept; a file's come again."""
    step = sum(map(len, facts.by_kind.values()))
    drawn = config.training.steps * step
    if config.data.train == "builtin" or not facts.num_records:
        return drawn
    return min(drawn, facts.num_records * step / len(facts.edits))
