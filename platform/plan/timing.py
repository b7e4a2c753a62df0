"""The bytes that a step moves between processes, and the seconds of its stages at given rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from timeit import repeat
from typing import cast

import torch
from torch import nn

from malmen.config import Config
from malmen.errors import UsageError
from malmen.lm.devices import bfloat16_gain
from malmen.lm.stem import stem_blocks
from malmen.platform.plan.data import StepFacts
from malmen.platform.plan.devices import Device
from malmen.platform.plan.hypernet import RehearsedHypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM
from malmen.platform.plan.meter import Cost
from malmen.shards import divide

# Assumed where nothing is given or measured: FLOP/s of a core and bytes/s, as the machine of docs/plan.md does; of a
# card's data sheet this share.
_CORE = {torch.bfloat16: 25e9, torch.float32: 50e9, torch.float64: 25e9}
_MEMORY = 8e9
_REACHED = 0.5
_CALL = 1e-5  # seconds of an operation, however small

NETWORK = 1.25  # GB/s between processes: 10 Gbit/s
GATHER = {"cpu": NETWORK, "cuda": 100.0}  # GB/s among LM workers (ZeRO-3, sums of gradients): NVLink within a machine


@dataclass(frozen=True)
class Rates:
    """How fast a process of a role works."""

    products: dict[torch.dtype, float]  # FLOP/s of large matrix products
    memory: float  # bytes/s of everything else
    source: str

    def describe(self, dtype: torch.dtype) -> str:
        """The rate for a table."""
        return f"{self.source}, {self.products[dtype] / 1e9:,.0f} GFLOP/s in {str(dtype).removeprefix('torch.')}"

    def seconds(self, cost: Cost) -> float:
        """Products at their rate, the rest at the memory's, and a little for every call."""
        products = sum(flops / self.products[dtype] for dtype, flops in cost.flops.items())
        return products + cost.touched / self.memory + cost.calls * _CALL


@dataclass(frozen=True)
class Stage:
    """A part of a step, on the process that takes longest for it."""

    name: str
    flops: int
    moved: int  # bytes over the network, of the busiest process
    seconds: float


@lru_cache
def find_rates(device: Device, dtype: torch.dtype, gflops: float | None, measure: bool) -> Rates:
    """The rate given for this type, measured here, or assumed; other types are in the assumed proportion to it."""
    assumed, memory = _assumed(device, dtype)
    known, rate = dtype, assumed[dtype]
    source = f"{_REACHED:.0%} of the data sheet of {device.name}" if device.card else f"assumed ({device.name})"
    if measure:
        if device.card is not None:
            raise UsageError("--measure measures the CPUs here, but the plan is for GPUs: give --flops")
        share = min(1.0, device.threads / torch.get_num_threads())
        known, rate, memory, source = torch.float32, gemm_rate() * share, copy_rate() * share, "measured here"
    elif gflops is not None:
        rate, source = gflops * 1e9, "given"
    return Rates({kind: rate * other / assumed[known] for kind, other in assumed.items()}, memory, source)


def _assumed(device: Device, dtype: torch.dtype) -> tuple[dict[torch.dtype, float], float]:
    """FLOP/s by type, and bytes/s; a card without bfloat16 does it, if it must, as float32."""
    if card := device.card:
        by_type = {torch.float64: card.float64, torch.float32: card.tf32 if device.tf32 else card.float32}
        by_type[torch.bfloat16] = card.bfloat16 or card.float32
        return {kind: rate * 1e12 * _REACHED for kind, rate in by_type.items()}, card.bandwidth * 1e9 * _REACHED
    rates = {kind: rate * device.threads for kind, rate in _CORE.items()}
    if dtype == torch.bfloat16:
        rates[dtype] = rates[torch.float32] * bfloat16_gain()
    return rates, _MEMORY


def gemm_rate(size: int = 1024) -> float:
    """FLOP/s of a large float32 product on this machine, now."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(repeat(lambda: torch.mm(left, right), number=1))


def copy_rate(size: int = 2**24) -> float:
    """Bytes/s of adding two float32 vectors, read and written."""
    vector, out = torch.ones(size), torch.empty(size)
    return 3 * vector.nbytes / min(repeat(lambda: torch.add(vector, vector, out=out), number=1))


# --- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfers:
    """Bytes of one step, summed over all processes."""

    traces: int  # (ii) LM workers to actors
    shifts: int  # (iii) actors to every LM worker
    shift_grads: int  # (iv) LM workers to every actor that has tokens of the layer
    shift_grad_sum: int  # over the LM workers
    solve: int  # between actors that share a layer
    theta_grads: int  # (vii) over the actors
    weights: int  # gathered by ZeRO-3

    @property
    def objects(self) -> int:
        """Through Ray's object store: `bytes_moved` of a run's history."""
        return self.traces + self.shifts + self.shift_grads


def find_transfers(
    config: Config, planned: PlannedLM, facts: StepFacts, lm: RehearsedLM, hypernet: RehearsedHypernet
) -> Transfers:
    """Bytes from shapes alone. In a sum over k processes each sends 2(k − 1)/k of its size."""
    workers, actors = config.cluster.lm_workers, config.cluster.hypernet_actors
    by_layer = {layer.name: layer.key_size * layer.value_size for layer in planned.layers}
    holders = [share.layer for shares in divide(list(by_layer), actors) for share in shares]
    size = torch.promote_types(planned.lm.dtype, torch.float32).itemsize
    gathers = 0.0
    if config.lm.sharding == "zero3":
        gathers = (workers - 1) * planned.weight_bytes * _passes(planned) * lm.micro_batches / 3
    return Transfers(
        traces=planned.feature_bytes(facts.edits, config.editor.tokens),
        shifts=planned.shift_bytes * workers,
        shift_grads=size * sum(by_layer[name] for name in holders),
        shift_grad_sum=2 * (workers - 1) * planned.shift_bytes,
        solve=hypernet.gathered * (actors > 1) * actors,
        theta_grads=2 * (actors - 1) * hypernet.theta,
        weights=round(gathers),
    )


def _passes(planned: PlannedLM) -> float:
    """How often three micro-batches, one of each kind of facts, go through the weights. Below every edit once each;
    from there upwards, the head included: trace and L_gen forward and backward, L_loc two forwards and backward."""
    below = 0
    for stack, count in stem_blocks(planned.lm, planned.layers).items():
        blocks = cast(nn.ModuleList, planned.lm.model.get_submodule(planned.lm.stacks[stack]))
        below += sum(parameter.numel() for parameter in blocks[:count].parameters())
    return 7 - 4 * below / planned.num_parameters


# --- seconds -----------------------------------------------------------------------------------------


def find_stages(
    config: Config, lm: RehearsedLM, hypernet: RehearsedHypernet, moved: Transfers, rates: Sequence[Rates],
    bandwidths: tuple[float, float],
) -> list[Stage]:  # fmt: skip
    """The stages of a step in their order; bandwidths between all processes and among LM workers in GB/s."""
    network, gather = (1e9 * bandwidth for bandwidth in bandwidths)
    workers, actors = config.cluster.lm_workers, config.cluster.hypernet_actors
    objects = moved.traces // workers + moved.shifts // workers + moved.shift_grads // min(workers, actors)
    sums = moved.theta_grads // actors + moved.solve // actors
    gathered = (moved.weights + moved.shift_grad_sum) // workers  # among the LM workers
    computed = [(name, lm.costs[name], rates[0]) for name in ("trace", "meta_loss")]
    computed += [(name, hypernet.costs[name], rates[1]) for name in ("solve", "hypernet", "adam")]
    stages = [Stage(name, cost.total_flops, 0, rate.seconds(cost)) for name, cost, rate in computed]
    stages.append(Stage("transfer", 0, objects + sums, (objects + sums) / network))
    if gathered:
        stages.append(Stage("gather", 0, gathered, gathered / gather))
    return stages


def step_seconds(config: Config, stages: list[Stage]) -> float:
    """Seconds of a step: all stages in turn, except that with overlap the next trace runs while the actors
    back-propagate."""
    seconds = {stage.name: stage.seconds for stage in stages}
    total = sum(seconds.values())
    if config.cluster.overlap:
        total -= min(seconds["trace"], seconds["hypernet"] + seconds["adam"])
    return total
