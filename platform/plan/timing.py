"""The bytes that a step moves between processes, and the seconds of its stages at given rates."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from malmen.config import Config
from malmen.errors import UsageError
from malmen.platform.plan.hypernet import RehearsedHypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM
from malmen.platform.plan.meter import Cost
from malmen.shards import divide

# Assumed where nothing is given or measured. A core: what the machine of docs/plan.md does. A GPU: half of what an
# A100's data sheet says (bfloat16 312, float32 without TF32 19.5, float64 19.5 TFLOP/s; memory 2 TB/s).
_PER_CORE = {torch.bfloat16: 25e9, torch.float32: 50e9, torch.float64: 25e9}
_PER_GPU = {torch.bfloat16: 156e12, torch.float32: 9.75e12, torch.float64: 9.75e12}
_MEMORY = {"cpu": 8e9, "cuda": 1e12}  # bytes a second
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


def find_rates(device: str, dtype: torch.dtype, processes: int, gflops: float | None, measure: bool) -> Rates:
    """The rate given for this type, measured here, or assumed; other types are in the assumed proportion to it."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    factor = 1 if device == "cuda" else threads
    assumed = {kind: rate * factor for kind, rate in (_PER_GPU if device == "cuda" else _PER_CORE).items()}
    if measure:
        if device == "cuda":
            raise UsageError("--measure measures the CPUs here, but the plan is for GPUs: give --flops")
        share = threads / torch.get_num_threads() if threads < torch.get_num_threads() else 1.0
        rate = gemm_rate() * share
        scaled = {kind: rate * other / assumed[torch.float32] for kind, other in assumed.items()}
        return Rates(scaled, copy_rate() * share, "measured here")
    if gflops is not None:
        scaled = {kind: gflops * 1e9 * other / assumed[dtype] for kind, other in assumed.items()}
        return Rates(scaled, _MEMORY[device], "given")
    where = "half an A100" if device == "cuda" else f"{threads} of the cores here"
    return Rates(assumed, _MEMORY[device], f"assumed ({where})")


def gemm_rate(size: int = 1024) -> float:
    """FLOP/s of a large float32 product on this machine, now."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right))


def copy_rate(size: int = 2**24) -> float:
    """Bytes/s of adding two float32 vectors, read and written."""
    vector, out = torch.ones(size), torch.empty(size)
    return 3 * vector.nbytes / _best_seconds(lambda: torch.add(vector, vector, out=out))


def _best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
    config: Config, planned: PlannedLM, features: int, lm: RehearsedLM, hypernet: RehearsedHypernet
) -> Transfers:
    """Bytes from shapes alone. In a sum over k processes each sends 2(k − 1)/k of its size."""
    workers, actors = config.cluster.lm_workers, config.cluster.hypernet_actors
    holders = [share.layer for shares in divide([layer.name for layer in planned.layers], actors) for share in shares]
    size = torch.promote_types(planned.lm.dtype, torch.float32).itemsize
    by_layer = {layer.name: layer.key_size * layer.value_size * size for layer in planned.layers}
    gathers = 0.0
    if config.lm.sharding == "zero3":
        gathers = (workers - 1) * planned.weight_bytes * _passes(planned) * lm.micro_batches / 3
    return Transfers(
        traces=features,
        shifts=planned.shift_bytes * workers,
        shift_grads=sum(by_layer[name] for name in holders),
        shift_grad_sum=2 * (workers - 1) * planned.shift_bytes,
        solve=hypernet.gathered * (actors > 1) * actors,
        theta_grads=2 * (actors - 1) * hypernet.theta,
        weights=round(gathers),
    )


def _passes(planned: PlannedLM) -> float:
    """How often three micro-batches, one of each kind of facts, go through the weights; below every edit once each."""
    reached = reached_share(planned)
    return 3 * (1 - reached) + 7 * reached  # trace and L_gen: forward, backward; L_loc: two forwards, backward


def reached_share(planned: PlannedLM) -> float:
    """The share of the parameters from the first edited block upwards, the head included."""
    first: dict[str, int] = {}
    for layer in planned.layers:
        first[layer.stack] = min(layer.block, first.get(layer.stack, layer.block))
    below = 0
    for stack, name in planned.lm.stacks.items():
        for index, block in enumerate(planned.lm.model.get_submodule(name).children()):
            if index < first.get(stack, 0):
                below += sum(parameter.numel() for parameter in block.parameters())
    return 1 - below / planned.num_parameters


# --- seconds -----------------------------------------------------------------------------------------


def find_stages(
    config: Config, lm: RehearsedLM, hypernet: RehearsedHypernet, moved: Transfers, rates: tuple[Rates, Rates],
    network: float, gather: float,
) -> list[Stage]:  # fmt: skip
    """The stages of a step in their order; network and gather in bytes/s."""
    workers, actors = config.cluster.lm_workers, config.cluster.hypernet_actors
    objects = moved.traces // workers + moved.shifts // workers + moved.shift_grads // min(workers, actors)
    sums = moved.theta_grads // actors + moved.solve // actors
    gathered = (moved.weights + moved.shift_grad_sum) // workers  # among the LM workers
    stages = [_stage(name, lm.costs[name], rates[0]) for name in ("trace", "meta_loss")]
    stages += [_stage(name, hypernet.costs[name], rates[1]) for name in ("solve", "hypernet", "adam")]
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


def _stage(name: str, cost: Cost, rates: Rates) -> Stage:
    return Stage(name, cost.total_flops, 0, rates.seconds(cost))
