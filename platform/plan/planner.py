"""What a run will need: memory of each process, bytes moved, FLOPs and seconds by stage, and whether it fits.

Nothing is loaded or computed: the step's own code runs on torch's meta device (meter.py), with the model's shape
alone (shapes.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import torch

from malmen.config import SPLIT, Config
from malmen.lm.layers import LayerSpec
from malmen.platform.plan.data import StepFacts, find_pools, step_facts
from malmen.platform.plan.hypernet import Equation, RehearsedHypernet, find_equations, rehearse_hypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM, plan_lm, rehearse_lm
from malmen.platform.plan.memory import GB, MB, Role, hypernet_role, lm_role
from malmen.platform.plan.timing import (
    GATHER,
    NETWORK,
    Rates,
    Stage,
    Transfers,
    find_rates,
    find_stages,
    find_transfers,
    step_seconds,
)

T = TypeVar("T")

GPU_MEMORY = 79 * GB  # of a card sold with 80 GB, as torch counts
DRIVER = 2500 * MB  # the driver and Ray's own processes: 2.8 GB resident as measured, a part of it shared


@dataclass(frozen=True)
class PlanOptions:
    """What the config does not state. Memory in GB for each process, rates as on the command line."""

    lm_memory: float | None = None
    hypernet_memory: float | None = None
    gflops: float | None = None
    measure: bool = False
    bandwidth: float | None = None  # GB/s between processes
    gather_bandwidth: float | None = None  # GB/s of ZeRO-3's gathers
    fact_tokens: int | None = None
    answer_tokens: int | None = None


@dataclass
class Plan:
    """What a run will need."""

    config: Config
    parameters: int
    dtype: str
    layers: list[str]
    facts: int  # of one step, all kinds
    edit_tokens: int  # traced tokens of one step's edits in one layer, at most
    lm: Role
    hypernet: Role
    machine: tuple[int, int] | None  # bytes of all processes, and of this machine, where the run is to be on it
    transfers: Transfers
    stages: list[Stage]
    step_seconds: float
    assumptions: list[str] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether every process has the memory that it needs."""
        return self.lm.fits and self.hypernet.fits and (self.machine is None or self.machine[0] <= self.machine[1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes as they are."""
        roles = [
            {
                **asdict(role),
                "items": {item.name: item.bytes for item in role.items},
                "total": role.total,
                "fits": role.fits,
            }
            for role in (self.lm, self.hypernet)
        ]
        return {
            "model": self.config.model.name, "parameters": self.parameters, "dtype": self.dtype, "layers": self.layers,
            "facts": self.facts, "edit_tokens": self.edit_tokens, "fits": self.fits, "roles": roles,
            "machine": dict(zip(("needed", "has"), self.machine, strict=True)) if self.machine else None,
            "bytes_moved": {**asdict(self.transfers), "objects": self.transfers.objects},
            "stages": [asdict(stage) for stage in self.stages], "step_seconds": self.step_seconds,
            "run_seconds": self.step_seconds * self.config.training.steps, "assumptions": self.assumptions,
            "equations": [asdict(equation) for equation in self.equations],
        }  # fmt: skip


class Planner:
    """Plans of several configs; what two of them have in common is rehearsed once."""

    def __init__(self, options: PlanOptions | None = None) -> None:
        self.options = options or PlanOptions()
        self._made: dict[tuple[str, str], Any] = {}

    def plan(self, config: Config) -> Plan:
        """What a run of this config will need."""
        devices, dtype = find_devices(config), planned_dtype(config)
        if config.cluster.overlap is None:  # as cluster.size_roles decides on one machine
            config = _with_overlap(config, devices[0] != "cpu")
        rates = self._both_rates(config, devices, dtype)
        model, facts = self._model(config, dtype), self._step_facts(config, dtype)
        rehearsed, hypernet = self._lm(config, dtype), self._hypernet(config, dtype)
        lm_process = lm_role(config, model, facts, rehearsed, devices[0])
        actor = hypernet_role(config, hypernet, devices[1])
        machine = self._set_limits(lm_process, actor)
        features = model.feature_bytes(facts.edits, config.editor.tokens)
        moved = find_transfers(config, model, features, rehearsed, hypernet)
        network = (self.options.bandwidth or NETWORK) * 1e9
        gather = (self.options.gather_bandwidth or GATHER[devices[0]]) * 1e9
        stages = find_stages(config, rehearsed, hypernet, moved, rates, network, gather)
        return Plan(
            config,
            model.num_parameters,
            str(dtype).removeprefix("torch."),
            [layer.name for layer in model.layers],
            sum(map(len, facts.by_kind.values())),
            max(_num_traced(facts, layer, config.editor.tokens) for layer in model.layers),
            lm_process,
            actor,
            machine,
            moved,
            stages,
            step_seconds(config, stages),
            self._assumptions(config, model, facts, rehearsed, rates, (network, gather)),
            find_equations(config, model.layers, facts.edits),
        )

    def _set_limits(self, lm: Role, actor: Role) -> tuple[int, int] | None:
        """By option, a GPU's, or this machine's; in the last case all processes must fit together."""
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for role, given in ((lm, self.options.lm_memory), (actor, self.options.hypernet_memory)):
            role.limit = round(given * GB) if given is not None else GPU_MEMORY if role.device == "cuda" else has
        here = [
            role
            for role, given in ((lm, self.options.lm_memory), (actor, self.options.hypernet_memory))
            if role.device == "cpu" and given is None
        ]
        return (DRIVER + sum(role.total * role.processes for role in here), has) if here else None

    def _assumptions(
        self, config: Config, model: PlannedLM, facts: StepFacts, rehearsed: RehearsedLM, rates: tuple[Rates, Rates],
        bandwidths: tuple[float, float],
    ) -> list[str]:  # fmt: skip
        number, width = rehearsed.largest
        lines = [
            f"model: {model.source}",
            f"facts: {facts.source}; {rehearsed.micro_batches} micro-batches a step and worker, the largest of "
            f"{number} × {width} tokens; it holds {rehearsed.trace_peak / GB:.2f} GB while traced and, with shifts, "
            f"{rehearsed.meta_peak / GB:.2f} GB in the meta loss",
            f"rates: LM {rates[0].describe(model.lm.dtype)}; hyper-network {rates[1].describe(torch.float32)}",
            f"network {bandwidths[0] / 1e9:g} GB/s between processes",
        ]
        if config.lm.sharding == "zero3":
            lines.append(f"ZeRO-3 gathers weights at {bandwidths[1] / 1e9:g} GB/s, and keeps up to 1e9 of them whole")
        if "cuda" in find_devices(config):
            lines.append("the host's memory is not planned: weights pass through it, and Ray's object store is in it")
        if facts.recurring(config):
            lines.append(f"facts that recur within the run: {', '.join(facts.recurring(config))}")
        return lines

    # --- what is rehearsed once --------------------------------------------------------------------------

    def _model(self, config: Config, dtype: torch.dtype) -> PlannedLM:
        key = _key(config, dtype, "model", "lm", "editor.layers", "editor.ffn")
        return self._once("model", key, lambda: plan_lm(config, dtype))

    def _step_facts(self, config: Config, dtype: torch.dtype) -> StepFacts:
        drawn = ("training.equivalents_per_edit", "training.unrelated_per_edit")
        lengths = (self.options.fact_tokens, self.options.answer_tokens)
        pools = self._once(
            "pools",
            _key(config, None, "seed", "model", "data", *drawn),
            lambda: find_pools(config, self._model(config, dtype).lm, *lengths),
        )
        key = _key(config, None, "seed", "model", "data", "training")
        return self._once("facts", key, lambda: step_facts(config, pools))

    def _lm(self, config: Config, dtype: torch.dtype) -> RehearsedLM:
        names = ("model", "lm", "data", "training", "editor.layers", "editor.ffn", "editor.tokens")
        key = _key(config, dtype, *names, "batch.token_budget", "cluster.lm_workers")
        model, facts = self._model(config, dtype), self._step_facts(config, dtype)
        return self._once("lm", key, lambda: rehearse_lm(config, model, facts, find_devices(config)[0]))

    def _hypernet(self, config: Config, dtype: torch.dtype) -> RehearsedHypernet:
        names = ("model", "data", "training", "editor", "batch.hypernet_rows", "cluster.hypernet_actors")
        layers, edits = self._model(config, dtype).layers, self._step_facts(config, dtype).edits
        key = _key(config, dtype, *names)
        return self._once("hypernet", key, lambda: rehearse_hypernet(config, layers, edits, dtype))

    def _both_rates(self, config: Config, devices: tuple[str, str], dtype: torch.dtype) -> tuple[Rates, Rates]:
        """Rates of an LM worker and of an actor; a rate given for the LM's device does not hold for another device."""

        def rates(device: str, processes: int) -> Rates:
            known = (device, dtype, processes, self.options.gflops if device == devices[0] else None)
            return self._once("rates", repr(known), lambda: find_rates(*known, self.options.measure))

        return rates(devices[0], config.cluster.lm_workers), rates(devices[1], config.cluster.hypernet_actors)

    def _once(self, what: str, key: str, make: Callable[[], T]) -> T:
        """What `make` gives; it is called once for each key."""
        if (what, key) not in self._made:
            self._made[what, key] = make()
        return cast(T, self._made[what, key])


def find_devices(config: Config) -> tuple[str, str]:
    """cpu or cuda, of the LM workers and of the actors: as the config says, else as this machine has it."""
    name, cluster = config.model.device, config.cluster
    if name == "cpu":
        return "cpu", "cpu"
    gpus = torch.cuda.is_available() if cluster.lm_gpus is None else cluster.lm_gpus > 0
    lm = "cuda" if name.startswith(("cuda", SPLIT)) or gpus else "cpu"
    actors = lm == "cuda" if cluster.hypernet_gpus is None else cluster.hypernet_gpus > 0
    return lm, "cuda" if actors else "cpu"


def _with_overlap(config: Config, overlap: bool) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"overlap": overlap})})


def planned_dtype(config: Config) -> torch.dtype:
    """The LM's, as `model.dtype` says or as its device would have it."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)  # type: ignore[no-any-return]
    return torch.bfloat16 if find_devices(config)[0] == "cuda" else torch.float32


def _num_traced(facts: StepFacts, layer: LayerSpec, tokens: str) -> int:
    return sum(fact.num_traced(layer.stack, tokens) for fact in facts.edits)


def _key(config: Config, dtype: torch.dtype | None, *names: str) -> str:
    """These parts of the config as text."""
    parts: list[Any] = [dtype]
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        parts.append(value)
    return repr(parts)
