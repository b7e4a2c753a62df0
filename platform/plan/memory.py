"""The memory of an LM worker and of a hypernet actor at their peaks, item by item."""

from __future__ import annotations

from dataclasses import dataclass, field

from malmen.config import Config
from malmen.lm.key_moments import layers_at_once, sums_bytes
from malmen.platform.plan.data import StepFacts
from malmen.platform.plan.hypernet import RehearsedHypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM, cache_bytes

MB, GB = 2**20, 2**30

# Measured, see docs/plan.md: python, torch, ray and, in an LM worker, transformers, before any model is loaded.
_BASE = {"LM worker": 590 * MB, "hypernet actor": 400 * MB}
_DEEPSPEED = 100 * MB  # what DeepSpeed adds to it
_HOARDED = 0.75  # share of the blocks up to the mmap threshold that glibc keeps beyond those in use
_LONG_RUN = 60 * MB  # what it keeps in every long run
_RECORD, _FACT = 5500, 500  # bytes of a parsed record and of an encoded fact

# Assumed, not measured: CUDA's context and workspaces, and the share of its memory that the allocator leaves unused.
_CUDA = GB
_FRAGMENTS = 0.1


@dataclass(frozen=True)
class Item:
    """A part of what a process holds at its peak."""

    name: str
    bytes: int


@dataclass
class Role:
    """One process of a role."""

    name: str
    processes: int
    device: str  # cpu or cuda
    items: list[Item] = field(default_factory=list)
    limit: int = 0  # bytes that it may have

    @property
    def total(self) -> int:
        """At the peak."""
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether the limit is enough."""
        return self.total <= self.limit

    def add(self, name: str, size: float) -> None:
        """Add an item, unless it is empty."""
        if size > 0:
            self.items.append(Item(name, round(size)))


@dataclass(frozen=True)
class Held:
    """What an LM worker holds beside its weights at some time, in bytes."""

    traces: int
    shifts: int
    total: int
    merged: int = 0
    moments: int = 0


def lm_role(config: Config, planned: PlannedLM, facts: StepFacts, rehearsed: RehearsedLM, device: str) -> Role:
    """An LM worker at its peak: in the meta loss, or tracing the next step while it holds traces and shifts of this."""
    workers, overlap = config.cluster.lm_workers, bool(config.cluster.overlap)
    role = Role("LM worker", workers, device)
    sharded = config.lm.sharding == "zero3"
    _base(role, more=_DEEPSPEED if sharded else 0)
    role.add("weights" + (f", 1/{workers}" if sharded else ""), planned.weight_bytes / (workers if sharded else 1))
    if sharded:
        role.add("whole weights gathered at once", planned.gathered_bytes())
    shifts, features = planned.shift_bytes, planned.feature_bytes(facts.edits, config.editor.tokens) // workers
    received = 1 if device == "cpu" else 0  # shifts as they arrive; with a GPU they are in the host's memory
    ahead = (received + 1) * overlap  # shifts and gradients of the step before, while the next one is traced
    peaks = [  # in the meta loss, while tracing, while the traces are put in order
        Held(features, shifts * (received + 2), rehearsed.meta_peak + features, _matrices(planned)),
        Held(
            features * (1 + overlap), shifts * ahead, rehearsed.trace_peak + features * (1 + overlap) + shifts * ahead
        ),
        Held(features * (2 + overlap), shifts * ahead, features * (2 + overlap) + shifts * ahead),
    ]
    if config.editor.preserving:  # read before the first step; a forward holds less than tracing does
        sums = max(sums_bytes(part) for part in layers_at_once(planned.layers))
        peaks.append(Held(0, 0, rehearsed.trace_peak + sums, moments=sums))
    most = max(peaks, key=lambda held: held.total)
    role.add("traces of its edits", most.traces)
    role.add("shifts and their gradients", most.shifts)
    role.add("W + S, or S in the LM's type", most.merged)
    role.add("moments of the keys to preserve, before the first step", most.moments)
    named = most.traces + most.shifts + most.merged + most.moments
    role.add("activations and logits of a micro-batch", most.total - named)
    role.add("cache of what recurs", cache_bytes(config, planned, facts))
    if device == "cpu":
        role.add("records and their tokens", facts.num_records * _RECORD + _num_encoded(config, facts) * _FACT)
        role.add("pages of Ray's object store", 2 * shifts + (1 + overlap) * features)
    _allocator(role, rehearsed.small_peak, most.total)
    return role


def hypernet_role(config: Config, rehearsed: RehearsedHypernet, device: str) -> Role:
    """A hyper-network actor at its peak: solving, or back-propagating."""
    role = Role("hypernet actor", config.cluster.hypernet_actors, device)
    _base(role)
    role.add("θ", rehearsed.theta)
    role.add("Adam", rehearsed.adam)
    role.add("normalisers" + (", moments of the keys to preserve" if config.editor.preserving else ""), rehearsed.norms)
    held = {
        "keys and value gradients": rehearsed.features,
        "value_diffs": rehearsed.value_diffs,
        f"factors ({' and '.join(sorted(rehearsed.forms))})": rehearsed.kept,
        "shifts in float64": rehearsed.shifts,
    }
    if rehearsed.backward_peak >= rehearsed.solve_peak:
        held |= {
            "shift gradients": rehearsed.shift_grads,
            "pullbacks": rehearsed.pullbacks,
            "gradient of θ": rehearsed.theta,
        }
    for name, size in held.items():
        role.add(name, size)
    role.add(f"activations of {config.batch.hypernet_rows} rows, temporaries", rehearsed.peak - sum(held.values()))
    if device == "cpu":
        role.add(
            "pages of Ray's object store",
            (1 + bool(config.cluster.overlap)) * rehearsed.features + 2 * rehearsed.shift_grads,
        )
    _allocator(role, rehearsed.small_peak, rehearsed.peak)
    return role


def _num_encoded(config: Config, facts: StepFacts) -> float:
    """Facts that the run will have encoded at its end: each that it draws is kept; a file's come again."""
    drawn = config.training.steps * sum(len(kind) for kind in facts.by_kind.values())
    if config.data.train == "builtin" or not facts.num_records:
        return drawn
    return min(drawn, facts.num_records * sum(len(kind) for kind in facts.by_kind.values()) / len(facts.edits))


def _base(role: Role, more: int = 0) -> None:
    if role.device == "cpu":
        role.add("python, torch, ray" + (", transformers" if "LM" in role.name else ""), _BASE[role.name] + more)
    else:
        role.add("CUDA (assumed)", _CUDA)


def _allocator(role: Role, small: int, peak: int) -> None:
    if role.device == "cpu":
        role.add("freed, but kept by glibc", _HOARDED * small + _LONG_RUN)
    else:
        role.add("fragments (assumed)", _FRAGMENTS * peak)


def _matrices(planned: PlannedLM) -> int:
    return sum(layer.key_size * layer.value_size for layer in planned.layers) * planned.lm.dtype.itemsize
