"""The memory of an LM worker and of a hypernet actor at their peaks, item by item, on the card and on its host."""

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

# Assumed, not measured: CUDA's context and workspaces on the card, its libraries on the host, and the share of a card's
# memory that the allocator leaves unused.
_CUDA, _CUDA_HOST = GB, 2 * GB
_FRAGMENTS = 0.1
STORE_SHARE = 0.3  # of a node's memory, that Ray gives to its object store; what is beyond it goes to the disk

# Items of an LM worker that change with the time of a step.
_TRACES, _SHIFTS = "traces of its edits", "shifts and their gradients"
_MERGED, _MOMENTS = "W + S, or S in the LM's type", "moments of the keys to preserve, before the first step"


@dataclass
class Role:
    """One process of a role. Bytes at the peak, by what it holds."""

    name: str
    processes: int
    device: str  # cpu or cuda
    items: dict[str, int]  # on its device
    host: dict[str, int]  # in its node's memory beside a GPU; a process on CPUs has everything in `items`
    store: int  # of these, in Ray's object store
    limit: int | None = None  # bytes that it may have; None: unknown
    host_limit: int | None = None

    @property
    def total(self) -> int:
        """On its device."""
        return sum(self.items.values())

    @property
    def in_node(self) -> int:
        """In its node's memory, wherever it computes."""
        return sum(self.host.values()) if self.device == "cuda" else self.total

    @property
    def node_limit(self) -> int | None:
        """Bytes of its node's memory that it may have."""
        return self.host_limit if self.device == "cuda" else self.limit

    @property
    def fits(self) -> bool:
        """Whether the limits are enough; one that is unknown is."""
        fits = self.limit is None or self.total <= self.limit
        return fits and (self.node_limit is None or self.in_node <= self.node_limit)


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
        terms = len(config.editor.preserved_terms)
        sums = max(sums_bytes(part, terms) for part in layers_at_once(planned.layers, terms))
        peaks.append((rehearsed.trace_peak + sums, {_MOMENTS: sums}))
    total, held = max(peaks, key=lambda peak: peak[0])
    items = {
        "weights" + (f", 1/{workers}" if sharded else ""): planned.weight_bytes / (workers if sharded else 1),
        "whole weights gathered at once": planned.gathered_bytes() if sharded else 0,
        **held,
        "activations and logits of a micro-batch": total - sum(held.values()),
        "cache of what recurs": cache_bytes(config, planned, facts),
    }
    hosted = {"records and their tokens": facts.num_records * _RECORD + _num_encoded(config, facts) * _FACT}
    process = _LM_WORKER + _DEEPSPEED * sharded
    store = 2 * shifts + (1 + overlap) * features
    if device == "cpu":
        items |= hosted
    else:
        moving = {
            "shifts and gradients on their way": 2 * shifts,
            "traces on their way": features // config.cluster.hypernet_actors,
            "pages of Ray's object store": store,
        }
        loading = {"weights on their way to the card": planned.loading_bytes(config.model)}
        at_once = max((moving, loading), key=lambda part: sum(part.values()))  # the weights come before all else
        hosted |= at_once
    return _role("LM worker", workers, device, process, items, hosted, store, rehearsed.small_peak, total)


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
    store = (1 + bool(config.cluster.overlap)) * rehearsed.features + 2 * rehearsed.shift_grads
    hosted = {
        "one layer on its way": 2 * max(rehearsed.features, rehearsed.shift_grads) // max(1, rehearsed.layers),
        "θ and Adam, while a checkpoint is saved": rehearsed.theta + rehearsed.adam,
        "pages of Ray's object store": store,
    }
    actors, peak, small = config.cluster.hypernet_actors, rehearsed.peak, rehearsed.small_peak
    return _role("hypernet actor", actors, device, _HYPERNET_ACTOR, items, hosted, store, small, peak)


def _role(
    name: str, processes: int, device: str, process: int, tensors: Mapping[str, float], hosted: Mapping[str, float],
    store: int, small: int, peak: int,
) -> Role:  # fmt: skip
    """The tensors with what the process, the allocator and Ray's object store add to them."""
    python = "python, torch, ray" + ", transformers" * (process != _HYPERNET_ACTOR)
    if device == "cpu":
        kept = {"pages of Ray's object store": store, "freed, but kept by glibc": _HOARDED * small + _LONG_RUN}
        return Role(name, processes, device, _held({python: process}, tensors, kept), {}, store)
    items = _held({"CUDA (assumed)": _CUDA}, tensors, {"fragments (assumed)": _FRAGMENTS * peak})
    host = _held({f"{python}, CUDA (assumed)": process + _CUDA_HOST}, hosted)
    return Role(name, processes, device, items, host, store)


def _held(*parts: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for part in parts for name, size in part.items() if size > 0}


def _num_encoded(config: Config, facts: StepFacts) -> float:
    """Facts that the run will have encoded at its end: each that it draws is kept; a file's come again."""
    step = sum(map(len, facts.by_kind.values()))
    drawn = config.training.steps * step
    if config.data.train == "builtin" or not facts.num_records:
        return drawn
    return min(drawn, facts.num_records * step / len(facts.edits))
