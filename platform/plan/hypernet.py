"""What a hyper-network actor needs: θ by its shapes, and a rehearsal of one step on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.tokens import EncodedFact
from malmen.editor import Editor, HypernetRows
from malmen.hypernet import Statistics
from malmen.least_squares import DualSolution, is_dual
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import LayerTrace, Traces
from malmen.platform.plan.meter import Cost, Meter
from malmen.shards import PartOfDual, ProcessGroupShards, Share, SolvedShard, divide, find_members

_BATCHES = 3  # batches of the hyper-network that are rehearsed, at most


@dataclass(frozen=True)
class Equation:
    """The normal equation of a layer: U Uᵀ of (key, key), or of (token, token) where those are fewer."""

    layer: str
    form: str  # primal or dual
    size: int  # rows of its matrix
    gram: int  # bytes, in float64
    factor: int  # the same, of the Cholesky factor that is kept for the way back


def find_equations(config: Config, layers: list[LayerSpec], edits: Sequence[EncodedFact]) -> list[Equation]:
    """Of every edited layer; a sum of shifts solves none."""
    if config.editor.aggregation == "sum":
        return []
    equations = []
    for layer in layers:
        tokens = sum(fact.num_traced(layer.stack, config.editor.tokens) for fact in edits)
        dual = is_dual(tokens, layer.key_size, config.editor.preserving)
        size, form = (tokens, "dual") if dual else (layer.key_size, "primal")
        equations.append(Equation(layer.name, form, size, 8 * size**2, 8 * size**2))
    return equations


@dataclass
class RehearsedHypernet:
    """One actor's share of a step, in bytes; of several actors, the one that needs most."""

    theta: int = 0  # the parameters
    norms: int = 0  # the normalisers' statistics, and the moments of keys to preserve
    adam: int = 0
    features: int = 0  # keys and value gradients
    value_diffs: int = 0
    kept: int = 0  # factors, and what else a solution keeps for the way back
    shifts: int = 0  # of the actor's layers, in float64
    shift_grads: int = 0  # received
    pullbacks: int = 0  # M, or ∇_D L, of all layers
    solve_peak: int = 0  # held at once while solving, features included
    backward_peak: int = 0  # the same while back-propagating, θ's gradient included
    small_peak: int = 0  # the part of both that the allocator may keep
    forms: set[str] = field(default_factory=set)  # primal, dual
    gathered: int = 0  # bytes that shards of one layer send each other
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Beside θ, its statistics and Adam, which stay between steps."""
        return max(self.solve_peak, self.backward_peak)


def rehearse_hypernet(
    config: Config, layers: list[LayerSpec], edits: Sequence[EncodedFact], dtype: torch.dtype
) -> RehearsedHypernet:
    """One step of the actor whose share is the largest; `dtype` is the LM's."""
    counts = {layer.name: sum(fact.num_traced(layer.stack, config.editor.tokens) for fact in edits) for layer in layers}
    sizes = {layer.name: layer.key_size + layer.value_size for layer in layers}
    plan = divide([layer.name for layer in layers], config.cluster.hypernet_actors)
    work = [sum(_rows(share, counts) * sizes[share.layer] for share in shares) for shares in plan]
    busiest = work.index(max(work))
    with torch.device("meta"):
        editor = _RehearsedEditor(layers, config)
    editor.shards = _RehearsedShards(plan, counts, busiest)
    rehearsed = RehearsedHypernet()
    rehearsed.theta, rehearsed.norms = _bytes(editor.parameters()), _bytes(editor.buffers())
    rehearsed.adam = 2 * rehearsed.theta + 4 * len(list(editor.parameters()))  # two moments, and its count of steps
    _rehearse(editor, rehearsed, {share.layer: _rows(share, counts) for share in plan[busiest]}, dtype)
    rehearsed.costs["adam"] = Cost(touched=10.0 * rehearsed.theta, calls=8.0 * len(list(editor.parameters())))
    return rehearsed


def _rehearse(editor: _RehearsedEditor, rehearsed: RehearsedHypernet, rows: dict[str, int], dtype: torch.dtype) -> None:
    """observe · solve · backward, as the actor does it."""
    meter = editor.meter = Meter(*editor.parameters(), *editor.buffers())
    with meter:
        traces: Traces = {
            layer.name: LayerTrace(
                torch.empty(rows[layer.name], layer.key_size, dtype=dtype, device="meta"),
                torch.empty(rows[layer.name], layer.value_size, dtype=dtype, device="meta"),
            )
            for layer in editor.layers
            if layer.name in rows
        }
    with meter.stage(rehearsed.costs, "solve"):
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
        solved.residuals()
    rehearsed.solve_peak, meter.peak = meter.peak, meter.held
    rehearsed.features = _bytes(tensor for pair in traces.values() for tensor in pair)
    rehearsed.value_diffs, rehearsed.shifts = _bytes(solved.value_diffs.values()), _bytes(solved.shifts.values())
    shards = editor.shards
    assert isinstance(shards, _RehearsedShards)
    rehearsed.kept, rehearsed.pullbacks = shards.kept, shards.pullbacks
    rehearsed.forms, rehearsed.gathered = shards.forms or {"sum"}, shards.gathered
    with meter:
        grad_dtype = torch.promote_types(dtype, torch.float32)
        grads = {name: shift.new_empty(shift.shape, dtype=grad_dtype) for name, shift in solved.shifts.items()}
    rehearsed.shift_grads = _bytes(grads.values())
    with meter.stage(rehearsed.costs, "hypernet"):
        editor.backward(solved, grads)
    rehearsed.backward_peak, rehearsed.small_peak = meter.peak, meter.small_peak


class _RehearsedEditor(Editor):
    """An editor without numbers. The batches of the hyper-network are alike: a few run, and count for all."""

    meter: Meter

    def _run(self, shape: str, traces: Traces, *, grad: bool) -> Iterator[list[HypernetRows]]:
        counts = {layer.name: len(traces[layer.name].keys) for layer in self.groups[shape] if layer.name in traces}
        left = limit = _BATCHES * self.config.batch.hypernet_rows
        sample: Traces = {}
        for name, count in counts.items():
            sample[name] = LayerTrace(*(part[:left] for part in traces[name]))
            left -= min(left, count)
        self.meter.weight = max(1.0, sum(counts.values()) / limit)
        yield from super()._run(shape, sample, grad=grad)
        self.meter.weight = 1.0

    def damping(self) -> dict[str, float]:
        """Any number: θ has none."""
        return {layer.name: 1.0 for layer in self.layers}


class _RehearsedShards(ProcessGroupShards):
    """The other editors as a source of tensors of the right size; what a solve keeps and sends is counted."""

    def __init__(self, plan: Sequence[Sequence[Share]], counts: Mapping[str, int], world_rank: int) -> None:
        self.members, self.world_rank = find_members(plan), world_rank
        self.counts = {
            layer: [_rows(share, counts) for shares in plan for share in shares if share.layer == layer]
            for layer in self.members
        }
        self.kept = self.gathered = self.pullbacks = 0
        self.forms: set[str] = set()

    def gather_statistics(self, mine: Mapping[str, Statistics]) -> Iterable[tuple[str, Statistics]]:
        """This editor's own: those of the others are small."""
        return mine.items()

    def solve(
        self, layer: str, keys: Tensor, value_diffs: Tensor, damping: float, preserved: Tensor | None
    ) -> SolvedShard:
        """As the actor does it; what stays for the way back is counted."""
        solved = super().solve(layer, keys, value_diffs, damping, preserved)
        solution = solved.solution if isinstance(solved, PartOfDual) else solved
        kept = [solution.factor]
        if isinstance(solution, DualSolution):
            kept.append(solution.weights)
        if isinstance(solved, PartOfDual):
            kept.append(solved.all_keys)
        self.kept += _bytes(kept)
        self.pullbacks += solution.factor.element_size() * len(solution.factor) * value_diffs.shape[1]
        self.forms.add("dual" if isinstance(solution, DualSolution) else "primal")
        return solved

    def count_tokens(self, layer: str, _mine: int) -> list[int]:
        """As the plan divides them."""
        return self.counts[layer]

    def gather_rows(self, _layer: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """As much memory as the rows of all members."""
        received = rows.new_empty(sum(counts), rows.shape[1])
        self.gathered += _bytes([received])
        return received

    def sum_tensor(self, _layer: str, tensor: Tensor) -> None:
        """The sum is as large as the tensor."""
        self.gathered += _bytes([tensor])


def _rows(share: Share, counts: Mapping[str, int]) -> int:
    rows = share.rows(counts[share.layer])
    return rows.stop - rows.start


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
