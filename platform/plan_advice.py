"""Which settings would make a run fit: each is planned before it is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from malmen.config import Config, parse_config
from malmen.platform.plan import Plan, Planner

_SMALLEST = 64  # tokens or rows of a batch, edits, rank: below that it is no longer the same run


@dataclass(frozen=True)
class Advice:
    """Settings to change, and what a process of each role needs then."""

    settings: tuple[str, ...]
    lm: int
    hypernet: int


def advise(planner: Planner, plan: Plan) -> list[Advice]:
    """Single changes that make the plan fit; if there is none, the changes of both roles together."""
    if plan.fits:
        return []
    ways = [*_lm_ways(plan), *_hypernet_ways(plan)]
    found = [advice for way in ways if (advice := _first_that_fits(planner, plan.config, way))]
    if found:
        return found
    settings = _furthest(planner, plan, ways)
    changed = planner.plan(change(plan.config, settings)) if settings else plan
    return [Advice(settings, changed.lm.total, changed.hypernet.total)] if changed.fits else []


def change(config: Config, settings: Sequence[str]) -> Config:
    """The config with `section.key=value` on top."""
    raw = config.model_dump(mode="json")
    for setting in settings:
        name, value = setting.split("=", 1)
        section, key = name.split(".")
        raw[section][key] = int(value) if value.isdigit() else value
    return parse_config(raw, "the changed config")


Way = list[tuple[str, ...]]  # settings, the mildest first


def _lm_ways(plan: Plan) -> Iterator[Way]:
    config, budget = plan.config, plan.config.batch.token_budget
    if plan.lm.fits and (plan.machine is None or plan.machine[0] <= plan.machine[1]):
        return
    yield [(f"batch.token_budget={size}",) for size in _halves(budget)]
    if config.batch.cache_mb:
        yield [("batch.cache_mb=0",)]
    if plan.dtype == "float32":
        yield [("model.dtype=bfloat16",)]
    more = [count for count in (2, 4, 8, 16, 32, 64) if count > config.cluster.lm_workers]
    if config.lm.sharding == "none":
        more = [count for count in (config.cluster.lm_workers, *more) if count > 1]
    yield [("lm.sharding=zero3", f"cluster.lm_workers={count}") for count in more]
    yield _fewer_layers(config)


def _hypernet_ways(plan: Plan) -> Iterator[Way]:
    config = plan.config
    if plan.hypernet.fits and (plan.machine is None or plan.machine[0] <= plan.machine[1]):
        return
    actors = [count for count in (2, 3, 4, 6, 8, 12, 16, 32, 64) if count > config.cluster.hypernet_actors]
    yield [(f"cluster.hypernet_actors={count}",) for count in actors]
    yield [(f"batch.hypernet_rows={size}",) for size in _halves(config.batch.hypernet_rows)]
    yield [(f"training.num_edits={size}",) for size in _halves(config.training.num_edits)]
    yield [(f"editor.rank={size}",) for size in _halves(config.editor.rank)]
    yield _fewer_layers(config)


def _halves(size: int) -> list[int]:
    sizes = []
    while size // 2 >= _SMALLEST:
        size //= 2
        sizes.append(size)
    return sizes


def _fewer_layers(config: Config) -> Way:
    match = re.fullmatch(r"(last|first):(\d+)", config.editor.layers) if isinstance(config.editor.layers, str) else None
    if match is None:
        return []
    return [(f"editor.layers={match[1]}:{count}",) for count in range(int(match[2]) - 1, 0, -1)]


def _first_that_fits(planner: Planner, config: Config, way: Way) -> Advice | None:
    """The mildest change of a way that fits; none where even the furthest does not."""
    if not way or not planner.plan(change(config, way[-1])).fits:
        return None
    for settings in way:
        changed = planner.plan(change(config, settings))
        if changed.fits:
            return Advice(settings, changed.lm.total, changed.hypernet.total)
    return None


def _furthest(planner: Planner, plan: Plan, ways: Sequence[Way]) -> tuple[str, ...]:
    """Way after way, each as far as it helps, until everything fits."""
    settings: tuple[str, ...] = ()
    best = plan
    for way in ways:
        helps: tuple[str, ...] = ()
        for step in way:
            changed = planner.plan(change(plan.config, (*settings, *step)))
            if _excess(changed) < _excess(best):
                best, helps = changed, step
            if changed.fits:
                break
        settings = (*settings, *helps)
        if best.fits:
            break
    return settings


def _excess(plan: Plan) -> int:
    over = [max(0, role.total - role.limit) for role in (plan.lm, plan.hypernet)]
    return sum(over) + (max(0, plan.machine[0] - plan.machine[1]) if plan.machine else 0)
