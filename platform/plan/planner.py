"""What a run will need: memory of each process, bytes moved, FLOPs and seconds by stage, and whether it fits.

Nothing is loaded or computed: the step's own code runs on torch's meta device (meter.py), with the model's shape
alone (shapes.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch

from malmen.config import SPLIT, Config
from malmen.lm.devices import resolve_dtype
from malmen.platform.plan.data import StepFacts, count_traced, step_facts
from malmen.platform.plan.hypernet import Equation, find_equations, rehearse_hypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM, plan_lm, rehearse_lm
from malmen.platform.plan.memory import GB, MB, Role, hypernet_role, lm_role
from malmen.platform.plan.shapes import hidden_size
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

_FACTS = ("model", "data", "training", "seed")
_LAYERS = ("lm", "editor.layers", "editor.ffn")
_DEPENDS_ON: dict[Callable[..., Any], tuple[str, ...]] = {  # settings, beside those of the LM's type and device
    plan_lm: ("model", *_LAYERS),
    step_facts: _FACTS,
    rehearse_lm: (*_FACTS, *_LAYERS, "editor.tokens", "batch.token_budget", "cluster.lm_workers"),
    rehearse_hypernet: (*_FACTS, "editor", "batch.hypernet_rows", "cluster.hypernet_actors"),
}


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
    assumptions: list[str]
    equations: list[Equation]

    @property
    def fits(self) -> bool:
        """Whether every process has the memory that it needs."""
        return self.lm.fits and self.hypernet.fits and (self.machine is None or self.machine[0] <= self.machine[1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes as they are."""
        plan = asdict(self)
        config, *roles, moved = (plan.pop(name) for name in ("config", "lm", "hypernet", "transfers"))
        return plan | {
            "model": config.model.name,
            "fits": self.fits,
            "roles": [
                {**role, "total": planned.total, "fits": planned.fits}
                for role, planned in zip(roles, (self.lm, self.hypernet), strict=True)
            ],
            "machine": dict(zip(("needed", "has"), self.machine, strict=True)) if self.machine else None,
            "bytes_moved": {**moved, "objects": self.transfers.objects},
            "run_seconds": self.step_seconds * config.training.steps,
        }


class Planner:
    """Plans of several configs; what two of them have in common is rehearsed once."""

    def __init__(self, options: PlanOptions | None = None) -> None:
        self.options = options or PlanOptions()
        self._made: dict[tuple[object, ...], Any] = {}

    def plan(self, config: Config) -> Plan:
        """What a run of this config will need."""
        options, (device, actor_device), dtype = self.options, find_devices(config), planned_dtype(config)
        if config.cluster.overlap is None:  # as cluster.size_roles decides on one machine
            cluster = config.cluster.model_copy(update={"overlap": device != "cpu"})
            config = config.model_copy(update={"cluster": cluster})
        rates = [  # one given for the LM's device does not hold for another
            find_rates(where, dtype, processes, options.gflops if where == device else None, options.measure)
            for where, processes in (
                (device, config.cluster.lm_workers),
                (actor_device, config.cluster.hypernet_actors),
            )
        ]
        model = self._once(plan_lm, config, dtype)
        facts = self._once(step_facts, config, model.lm, options.fact_tokens, options.answer_tokens)
        rehearsed = self._once(rehearse_lm, config, model, facts, device)
        hypernet = self._once(rehearse_hypernet, config, model.layers, facts.edits, dtype)
        lm_process = lm_role(config, model, facts, rehearsed, device)
        actor = hypernet_role(config, hypernet, actor_device)
        moved = find_transfers(config, model, facts, rehearsed, hypernet)
        bandwidths = options.bandwidth or NETWORK, options.gather_bandwidth or GATHER[device]
        stages = find_stages(config, rehearsed, hypernet, moved, rates, bandwidths)
        return Plan(
            config=config,
            parameters=model.num_parameters,
            dtype=str(dtype).removeprefix("torch."),
            layers=[layer.name for layer in model.layers],
            facts=sum(map(len, facts.by_kind.values())),
            edit_tokens=max(count_traced(model.layers, facts.edits, config.editor.tokens).values()),
            lm=lm_process,
            hypernet=actor,
            machine=self._set_limits(config, lm_process, actor),
            transfers=moved,
            stages=stages,
            step_seconds=step_seconds(config, stages),
            assumptions=_assumptions(config, model, facts, rehearsed, rates, bandwidths),
            equations=find_equations(config, model.layers, facts.edits),
        )

    def _once(self, make: Callable[..., T], config: Config, *arguments: Any) -> T:
        """What `make` gives; it is called once for all configs that agree in what it depends on."""
        settings = repr(attrgetter(*_DEPENDS_ON[make])(config))
        key = make, planned_dtype(config), find_devices(config), settings
        if key not in self._made:
            self._made[key] = make(config, *arguments)
        return cast(T, self._made[key])

    def _set_limits(self, config: Config, lm: Role, actor: Role) -> tuple[int, int] | None:
        """By option, a GPU's or its share of one, or this machine's: then all processes must fit together."""
        has, here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), []
        options, cluster = self.options, config.cluster
        for role, given, gpus in (
            (lm, options.lm_memory, cluster.lm_gpus),
            (actor, options.hypernet_memory, cluster.hypernet_gpus),
        ):
            card = round(GPU_MEMORY * min(1.0, gpus or 1.0))
            role.limit = round(given * GB) if given is not None else card if role.device == "cuda" else has
            if given is None and role.device == "cpu":
                here.append(role.total * role.processes)
        return (DRIVER + sum(here), has) if here else None


def find_devices(config: Config) -> tuple[str, str]:
    """cpu or cuda, of the LM workers and of the actors: as the config says, else as this machine has it."""
    name, cluster = config.model.device, config.cluster
    if name == "cpu":
        return "cpu", "cpu"
    gpus = torch.cuda.is_available() if cluster.lm_gpus is None else cluster.lm_gpus > 0
    lm = "cuda" if name.startswith(("cuda", SPLIT)) or gpus else "cpu"
    actors = lm == "cuda" if cluster.hypernet_gpus is None else cluster.hypernet_gpus > 0
    return lm, "cuda" if actors else "cpu"


def planned_dtype(config: Config) -> torch.dtype:
    """The LM's, as `model.dtype` says or as its device would have it."""
    if config.model.dtype == "auto" and find_devices(config)[0] == "cuda":
        return torch.bfloat16
    return resolve_dtype(config.model.model_copy(update={"device": "cpu"}), hidden_size(config.model))


def _assumptions(
    config: Config, model: PlannedLM, facts: StepFacts, rehearsed: RehearsedLM, rates: Sequence[Rates],
    bandwidths: tuple[float, float],
) -> list[str]:  # fmt: skip
    number, width = rehearsed.largest
    lines = [
        f"model: {model.source}",
        f"facts: {facts.source}; {rehearsed.micro_batches} micro-batches a step and worker, the largest of "
        f"{number} × {width} tokens; it holds {rehearsed.trace_peak / GB:.2f} GB while traced and, with shifts, "
        f"{rehearsed.meta_peak / GB:.2f} GB in the meta loss",
        f"rates: LM {rates[0].describe(model.lm.dtype)}; hyper-network {rates[1].describe(torch.float32)}",
        f"network {bandwidths[0]:g} GB/s between processes",
    ]
    if config.lm.sharding == "zero3":
        lines.append(f"ZeRO-3 gathers weights at {bandwidths[1]:g} GB/s, and keeps up to 1e9 of them whole")
    if "cuda" in find_devices(config):
        lines.append("the host's memory is not planned: weights pass through it, and Ray's object store is in it")
    if facts.recurring(config):
        lines.append(f"facts that recur within the run: {', '.join(facts.recurring(config))}")
    return lines
