"""What a hyper-network actor needs: θ by its shapes, and a rehearsal of one step on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.tokens import EncodedFact
from malmen.editor import Editor, HypernetRows, Solved
from malmen.least_squares import DualSolution, PreservingSolution, is_dual
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import LayerTrace, Traces
from malmen.platform.plan.data import count_traced
from malmen.platform.plan.meter import Cost, Meter, total_bytes
from malmen.shards import PartOfDual, ProcessGroupShards, Shards, Share, divide, find_members

_BATCHES = 3  # batches of the hyper-network that are rehearsed, at most


@dataclass(frozen=True)
class Equation:
    """The normal equation of a layer: U Uᵀ of (key, key), or of (token, token) where those are fewer."""

    layer: str
    form: str  # primal or dual
    size: int  # rows of its matrix
    gram: int  # bytes, in float64
    factor: int  # the same, of the Cholesky factor that is kept for the way back


def find_equations(config: Config, layers: Sequence[LayerSpec], edits: Sequence[EncodedFact]) -> list[Equation]:
    """Of every edited layer; a sum of shifts solves none."""
    counts = count_traced(layers, edits, config.editor.tokens) if config.editor.aggregation != "sum" else {}
    sizes = {layer.name: (layer.key_size, layer.value_size) for layer in layers}
    preserving, damped = config.editor.preserving, config.editor.regularisation
    equations = []
    for name, tokens in counts.items():
        dual = is_dual(tokens, *sizes[name], preserving=preserving, damped=damped)
        size, form = (tokens, "dual") if dual else (sizes[name][0], "primal")
        equations.append(Equation(name, form, size, 8 * size**2, 8 * size**2))
    return equations


@dataclass(frozen=True)
class RehearsedHypernet:
    """One actor's share of a step, in bytes; of several actors, the one that needs most."""

    theta: int  # the parameters
    norms: int  # the normalisers' statistics, and the moments of keys to preserve
    adam: int
    layers: int  # that it has tokens of
    features: int  # keys and value gradients
    value_diffs: int
    kept: int  # factors, and what else a solution keeps for the way back
    shifts: int  # of the actor's layers, in float64
    shift_grads: int  # received
    pullbacks: int  # M, or ∇_D L, of all layers
    solve_peak: int  # held at once while solving, features included
    backward_peak: int  # the same while back-propagating, θ's gradient included
    small_peak: int  # the part of both that the allocator may keep
    forms: set[str]  # primal, dual
    gathered: int  # bytes that shards of one layer send each other
    costs: dict[str, Cost]

    @property
    def peak(self) -> int:
        """Beside θ, its statistics and Adam, which stay between steps."""
        return max(self.solve_peak, self.backward_peak)


def rehearse_hypernet(
    config: Config, layers: Sequence[LayerSpec], edits: Sequence[EncodedFact], dtype: torch.dtype
) -> RehearsedHypernet:
    """observe · solve · backward of the actor whose share is the largest; `dtype` is the LM's."""
    counts = count_traced(layers, edits, config.editor.tokens)
    sizes = {layer.name: (layer.key_size, layer.value_size) for layer in layers}
    plan = divide(list(counts), config.cluster.hypernet_actors)
    rows = [{share.layer: _rows(share, counts) for share in shares} for shares in plan]
    busiest = max(range(len(rows)), key=lambda rank: sum(rows[rank][name] * sum(sizes[name]) for name in rows[rank]))
    with torch.device("meta"):
        editor = _RehearsedEditor(layers, config)
    shards = editor.shards = _RehearsedShards(find_members(plan), rows, busiest)
    meter = editor.meter = Meter(*editor.parameters(), *editor.buffers())
    costs: dict[str, Cost] = {}
    with meter, torch.device("meta"):
        traces: Traces = {
            name: LayerTrace(*(torch.empty(count, size, dtype=dtype) for size in sizes[name]))
            for name, count in rows[busiest].items()
        }
    with meter.stage(costs, "solve"):
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
    with meter:
        solved.residuals()  # of evaluations, for their memory: a step computes none
    solve_peak, meter.peak = meter.peak, meter.held
    with meter:
        received = torch.promote_types(dtype, torch.float32)
        grads = {name: shift.new_empty(shift.shape, dtype=received) for name, shift in solved.shifts.items()}
    solutions, kept = _kept(solved)
    forms = {form for form, _, _ in solutions} or {"sum"}
    with meter.stage(costs, "hypernet"):
        editor.backward(solved, grads)  # uses up the solutions
    theta, tensors = total_bytes(editor.parameters()), len(list(editor.parameters()))
    costs["adam"] = Cost(touched=10.0 * theta, calls=8.0 * tensors)
    return RehearsedHypernet(
        theta=theta,
        norms=total_bytes(editor.buffers()),
        adam=2 * theta + 4 * tensors,  # two moments, and its count of steps
        layers=len(traces),
        features=total_bytes(part for pair in traces.values() for part in pair),
        value_diffs=total_bytes(solved.value_diffs.values()),
        kept=kept,
        shifts=total_bytes(solved.shifts.values()),
        shift_grads=total_bytes(grads.values()),
        pullbacks=sum(8 * size * values for _, size, values in solutions),
        solve_peak=solve_peak,
        backward_peak=meter.peak,
        small_peak=meter.small_peak,
        forms=forms,
        gathered=shards.gathered,
        costs=costs,
    )


def _kept(solved: Solved) -> tuple[list[tuple[str, int, int]], int]:
    """Form, size of the factor and value size of each solution, and the bytes that all keep beside the shifts."""
    found, kept = [], 0
    for part in solved.solutions.values():
        solution = part.solution if isinstance(part, PartOfDual) else part
        dual = isinstance(solution, DualSolution | PreservingSolution)
        found.append(("dual" if dual else "primal", len(solution.factor), len(solution.shift)))
        kept += solution.factor.nbytes
        kept += solution.weights.nbytes if isinstance(solution, DualSolution | PreservingSolution) else 0
        if isinstance(solution, PreservingSolution):
            kept += solution.spread.nbytes + solution.metric.factor.nbytes  # A's
        kept += part.all_keys.nbytes if isinstance(part, PartOfDual) else 0
    return found, kept


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
    """The other editors as a source of tensors of the right size; what they send each other is counted."""

    gather_statistics = Shards.gather_statistics  # this editor's own: those of the others are small

    def __init__(self, members: dict[str, list[int]], rows: Sequence[Mapping[str, int]], world_rank: int) -> None:
        self.members, self.rows, self.world_rank = members, rows, world_rank
        self.gathered = 0

    def count_tokens(self, layer: str, _mine: int) -> list[int]:
        """As the plan divides them."""
        return [self.rows[rank][layer] for rank in self.members[layer]]

    def gather_rows(self, _layer: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """As much memory as the rows of all members."""
        received = rows.new_empty(sum(counts), rows.shape[1])
        self.gathered += received.nbytes
        return received

    def sum_tensor(self, _layer: str, tensor: Tensor) -> None:
        """The sum is as large as the tensor."""
        self.gathered += tensor.nbytes


def _rows(share: Share, counts: Mapping[str, int]) -> int:
    rows = share.rows(counts[share.layer])
    return rows.stop - rows.start
