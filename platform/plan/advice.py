"""Which settings would make a run fit: each is planned before it is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from malmen.config import Config, parse_config
from malmen.platform.plan.planner import Plan, Planner

_SMALLEST = 64  # tokens or rows of a batch, edits, rank: below that it would be another run
_MOST_PAIRS = 3  # of changes, where both roles need one
_LM_WORKERS = (2, 4, 8, 16, 32, 64)  # numbers that are tried
_ACTORS = (2, 3, 4, 6, 8, 12, 16, 32, 64)

Settings = tuple[str, ...]
Way = list[Settings]  # the mildest first; each needs less memory than the one before


@dataclass(frozen=True)
class Advice:
    """Settings to change, and what a process of each role needs then."""

    settings: Settings
    lm: int
    hypernet: int


def advise(planner: Planner, plan: Plan) -> list[Advice]:
    """Changes that make a plan fit: of one setting where that is enough, else of one for each role, else of many."""
    if plan.fits:
        return []

    def plan_with(*settings: str) -> Plan:
        return planner.plan(change(plan.config, settings))

    def mildest(ways: Sequence[Way], fits: Callable[[Plan], bool]) -> list[Settings]:
        """Of each way on which it fits at last, the mildest settings with which it does."""
        passable = [way for way in ways if fits(plan_with(*way[-1]))]
        return [next(settings for settings in way if fits(plan_with(*settings))) for way in passable]

    together = plan.lm.fits and plan.hypernet.fits  # then only all processes together need too much
    lm_ways = _lm_ways(plan) if together or not plan.lm.fits else []
    actor_ways = _hypernet_ways(plan) if together or not plan.hypernet.fits else []
    for_lm = mildest(lm_ways, lambda changed: changed.fits if together else changed.lm.fits)
    for_actor = mildest(actor_ways, lambda changed: changed.fits if together else changed.hypernet.fits)
    if plan.lm.fits or plan.hypernet.fits:
        changes = [*for_lm, *for_actor]
    else:
        changes = [_merge(*pair) for pair in zip(for_lm, for_actor, strict=False)][:_MOST_PAIRS]
    if not any(plan_with(*settings).fits for settings in changes):
        changes = [_mildest_of_all([*lm_ways, *actor_ways], lambda settings: plan_with(*settings).fits)]
    planned = [(settings, plan_with(*settings)) for settings in changes]
    return [Advice(settings, changed.lm.total, changed.hypernet.total) for settings, changed in planned if changed.fits]


def change(config: Config, settings: Sequence[str]) -> Config:
    """The config with `section.key=value` on top."""
    raw = config.model_dump(mode="json")
    for setting in settings:
        name, value = setting.split("=", 1)
        section, key = name.split(".")
        raw[section][key] = int(value) if value.isdigit() else value
    return parse_config(raw, "the changed config")


def _merge(for_lm: Settings, for_actor: Settings) -> Settings:
    """Both; of a setting that is in both, the smaller value."""
    merged: dict[str, str] = {}
    for setting in (*for_lm, *for_actor):
        name = setting.split("=")[0]
        merged[name] = min(merged.get(name, setting), setting, key=lambda one: (len(one), one))  # as numbers compare
    return tuple(merged.values())


def _mildest_of_all(ways: Sequence[Way], fits: Callable[[Settings], bool]) -> Settings:
    """All ways as far as they go, then each as mild as the others allow; it may still not fit."""
    chosen = [way[-1] for way in ways]
    if fits(sum(chosen, ())):
        for index, way in enumerate(ways):
            others = sum(chosen[:index] + chosen[index + 1 :], ())
            chosen[index] = next((mild for mild in [(), *way] if fits((*others, *mild))), way[-1])
    return sum(chosen, ())


# --- ways --------------------------------------------------------------------------------------------


def _lm_ways(plan: Plan) -> list[Way]:
    config, workers = plan.config, plan.config.cluster.lm_workers
    more = [count for count in _LM_WORKERS if count > workers]
    if config.lm.sharding == "none" and workers > 1:
        more = [workers, *more]
    sharded = () if config.lm.sharding == "zero3" else ("lm.sharding=zero3",)
    ways: list[Way] = [
        _halved("batch.token_budget", config.batch.token_budget),
        [("cluster.overlap=false",)] if config.cluster.overlap else [],
        [("batch.cache_mb=0",)] if config.batch.cache_mb else [],
        [("model.dtype=bfloat16",)] if plan.dtype == "float32" else [],
        [(*sharded, f"cluster.lm_workers={count}") for count in more],
        _halved("training.num_edits", config.training.num_edits),
        _fewer_layers(config),
    ]
    return [way for way in ways if way]


def _hypernet_ways(plan: Plan) -> list[Way]:
    config = plan.config
    ways: list[Way] = [
        [(f"cluster.hypernet_actors={count}",) for count in _ACTORS if count > config.cluster.hypernet_actors],
        _halved("batch.hypernet_rows", config.batch.hypernet_rows),
        _halved("training.num_edits", config.training.num_edits),
        _halved("editor.rank", config.editor.rank),
        _fewer_layers(config),
    ]
    return [way for way in ways if way]


def _halved(name: str, size: int) -> Way:
    halves = [size >> times for times in range(1, size.bit_length())]
    return [(f"{name}={half}",) for half in halves if half >= _SMALLEST]


def _fewer_layers(config: Config) -> Way:
    match = re.fullmatch(r"(last|first):(\d+)", config.editor.layers) if isinstance(config.editor.layers, str) else None
    return [(f"editor.layers={match[1]}:{count}",) for count in range(int(match[2]) - 1, 0, -1)] if match else []
