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

from malmen.config import Config
from malmen.lm.products import use_float32_products
from malmen.platform.plan.data import StepFacts, count_traced, step_facts
from malmen.platform.plan.devices import Devices, find_devices, planned_dtype
from malmen.platform.plan.hypernet import Equation, find_equations, rehearse_hypernet
from malmen.platform.plan.lm import PlannedLM, RehearsedLM, plan_lm, rehearse_lm
from malmen.platform.plan.memory import GB, MB, STORE_SHARE, Role, hypernet_role, lm_role
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

DRIVER = 2500 * MB  # the driver and Ray's own processes: 2.8 GB resident as measured, a part of it shared

_FACTS = ("model", "data", "training", "seed")
_LAYERS = ("lm", "editor.layers", "editor.ffn", "editor.attention")
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
    lm_card: str | None = None  # by a name of the table in malmen/lm/cards.py
    hypernet_card: str | None = None
    lm_host_memory: float | None = None  # GB of its node beside a GPU
    hypernet_host_memory: float | None = None


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
    devices: Devices
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
        use_float32_products(config.model)  # rates are those of the run
        options, devices = self.options, self._devices(config)
        dtype = planned_dtype(config, devices.lm)
        if config.cluster.overlap is None:  # as cluster.size_roles decides
            cluster = config.cluster.model_copy(update={"overlap": devices.lm.kind != "cpu" or not devices.here})
            config = config.model_copy(update={"cluster": cluster})
        if config.editor.products == "auto":  # as devices.slices_products decides
            card = devices.hypernet.card
            sliced = "sliced" if card is not None and card.slow_float64 else "float64"
            config = config.model_copy(update={"editor": config.editor.model_copy(update={"products": sliced})})
        # A rate given for the LM's device does not hold for another.
        same = options.gflops if devices.hypernet.card == devices.lm.card else None
        rates = [
            find_rates(device, dtype, gflops, options.measure)
            for device, gflops in ((devices.lm, options.gflops), (devices.hypernet, same))
        ]
        model = self._once(plan_lm, config, dtype)
        facts = self._once(step_facts, config, model.lm, options.fact_tokens, options.answer_tokens)
        rehearsed = self._once(rehearse_lm, config, model, facts, devices.lm.kind)
        hypernet = self._once(rehearse_hypernet, config, model.layers, facts.edits, dtype)
        lm_process = lm_role(config, model, facts, rehearsed, devices.lm.kind)
        actor = hypernet_role(config, hypernet, devices.hypernet.kind)
        moved = find_transfers(config, model, facts, rehearsed, hypernet)
        bandwidths = options.bandwidth or NETWORK, options.gather_bandwidth or GATHER[devices.lm.kind]
        stages = find_stages(config, rehearsed, hypernet, moved, rates, bandwidths)
        machine = self._set_limits(config, devices, lm_process, actor)
        return Plan(
            config=config,
            parameters=model.num_parameters,
            dtype=str(dtype).removeprefix("torch."),
            layers=[layer.name for layer in model.layers],
            facts=sum(map(len, facts.by_kind.values())),
            edit_tokens=max(count_traced(model.layers, facts.edits, config.editor.tokens).values()),
            lm=lm_process,
            hypernet=actor,
            devices=devices,
            machine=machine,
            transfers=moved,
            stages=stages,
            step_seconds=step_seconds(config, stages),
            assumptions=[
                *_assumptions(config, model, facts, rehearsed, rates, bandwidths),
                *_unknown(config, model, facts, [lm_process, actor]),
            ],
            equations=find_equations(config, model.layers, facts.edits),
        )

    def _once(self, make: Callable[..., T], config: Config, *arguments: Any) -> T:
        """What `make` gives; it is called once for all configs that agree in what it depends on."""
        settings = repr(attrgetter(*_DEPENDS_ON[make])(config))
        devices = self._devices(config)
        key = make, planned_dtype(config, devices.lm), devices, settings
        if key not in self._made:
            self._made[key] = make(config, *arguments)
        return cast(T, self._made[key])

    def _devices(self, config: Config) -> Devices:
        return find_devices(config, self.options.lm_card, self.options.hypernet_card)

    def _set_limits(self, config: Config, devices: Devices, lm: Role, actor: Role) -> tuple[int, int] | None:
        """By option, a card's memory or a share of it, or this machine's: then all processes must fit together."""
        has, here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), []
        options, cluster = self.options, config.cluster
        for role, device, gpus, given, host in (
            (lm, devices.lm, cluster.lm_gpus, options.lm_memory, options.lm_host_memory),
            (actor, devices.hypernet, cluster.hypernet_gpus, options.hypernet_memory, options.hypernet_host_memory),
        ):
            node = has if devices.here else None
            card = device.card and round(device.card.memory * GB * min(1.0, gpus or 1.0))
            role.limit = round(given * GB) if given is not None else card or node
            role.host_limit = round(host * GB) if host is not None else node
            if devices.here and (host if device.card else given) is None:
                here.append(role.in_node * role.processes)
        return (DRIVER + sum(here), has) if here else None


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
    if facts.recurring(config):
        lines.append(f"facts that recur within the run: {', '.join(facts.recurring(config))}")
    return lines


def _unknown(config: Config, model: PlannedLM, facts: StepFacts, roles: Sequence[Role]) -> list[str]:
    """What the plan cannot know, and what would be slow although it fits."""
    lines = []
    if not facts.num_records and config.batch.cache_mb and config.batch.cache_dir is None:
        lines.append(
            f"whether facts recur is unknown without {config.data.train}: if they do, a cache takes up to "
            f"{config.batch.cache_mb / 1024:.2f} GB more of each LM worker (batch.cache_mb)"
        )
    for role in roles:
        if role.node_limit is None:
            option = f"--{role.name.split()[0].lower()}-{'host-' if role.device == 'cuda' else ''}memory"
            lines.append(f"the memory of the nodes is unknown: give {option} to compare it with {role.name}s")
        elif role.store > STORE_SHARE * role.node_limit:
            lines.append(
                f"Ray's object store holds {role.store / GB:.2f} GB for a {role.name}, more than the "
                f"{STORE_SHARE:.0%} of its node's memory that Ray gives it: it will write to the disk"
            )
    return lines
