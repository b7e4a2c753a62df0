"""Which settings would make a run fit: each is planned before it is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from malmen.config import Config, parse_config
from malmen.platform.plan.planner import Plan, Planner

_SMALLEST = 64  # tokens or rows of a batch, edits, rank: below that it would be another run
_MOST_PAIRS = 3  # of changes, where both roles need one
_LM_WORKERS = (2, 4, 8, 16, 32, 64)  # numbers that are tried
_ACTORS = (2, 3, 4, 6, 8, 12, 16, 32, 64)

Settings = tuple[str, ...]
Way = list[Settings]  # the mildest first; each needs less memory than the one before
Fits = Callable[[Plan], bool]


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
    together = plan.lm.fits and plan.hypernet.fits  # then only all processes together need too much
    lm_ways = list(_lm_ways(plan)) if together or not plan.lm.fits else []
    actor_ways = list(_hypernet_ways(plan)) if together or not plan.hypernet.fits else []

    def mildest(ways: Sequence[Way], fits: Fits) -> list[Settings]:
        return [settings for way in ways if (settings := _mildest(planner, plan.config, (), way, fits))]

    for_lm = mildest(lm_ways, lambda changed: changed.fits if together else changed.lm.fits)
    for_actor = mildest(actor_ways, lambda changed: changed.fits if together else changed.hypernet.fits)
    if plan.lm.fits or plan.hypernet.fits:
        changes = [*for_lm, *for_actor]
    else:
        changes = [_merge(*pair) for pair in zip(for_lm, for_actor, strict=False)][:_MOST_PAIRS]
    tried = [_advice(planner, plan.config, settings) for settings in changes]
    return [advice for advice in tried if advice] or _many(planner, plan, [*lm_ways, *actor_ways])


def change(config: Config, settings: Sequence[str]) -> Config:
    """The config with `section.key=value` on top."""
    raw = config.model_dump(mode="json")
    for setting in settings:
        name, value = setting.split("=", 1)
        section, key = name.split(".")
        raw[section][key] = int(value) if value.isdigit() else value
    return parse_config(raw, "the changed config")


def _mildest(planner: Planner, config: Config, before: Settings, way: Way, fits: Fits) -> Settings | None:
    """Of a way, the mildest settings with which it fits; None where even the furthest do not."""
    if not way or not fits(planner.plan(change(config, (*before, *way[-1])))):
        return None
    return next(settings for settings in way if fits(planner.plan(change(config, (*before, *settings)))))


def _merge(for_lm: Settings, for_actor: Settings) -> Settings:
    """Both; of a setting that is in both, the smaller value."""
    merged = {setting.split("=")[0]: setting for setting in for_lm}
    for setting in for_actor:
        name = setting.split("=")[0]
        merged[name] = min(merged.get(name, setting), setting, key=_number)
    return tuple(merged.values())


def _number(setting: str) -> int:
    digits = re.search(r"\d+$", setting)
    return int(digits[0]) if digits else 0


def _advice(planner: Planner, config: Config, settings: Settings) -> Advice | None:
    changed = planner.plan(change(config, settings))
    return Advice(settings, changed.lm.total, changed.hypernet.total) if changed.fits else None


def _many(planner: Planner, plan: Plan, ways: Sequence[Way]) -> list[Advice]:
    """All ways as far as they go, then each as mild as the others allow."""
    chosen = {index: way[-1] for index, way in enumerate(ways) if way}

    def settings(without: int | None = None) -> Settings:
        return tuple(setting for index, part in chosen.items() if index != without for setting in part)

    if _advice(planner, plan.config, settings()) is None:
        return []
    for index in list(chosen):
        if _advice(planner, plan.config, settings(without=index)):
            del chosen[index]
            continue
        mildest = _mildest(planner, plan.config, settings(without=index), ways[index], lambda changed: changed.fits)
        chosen[index] = mildest or chosen[index]
    advice = _advice(planner, plan.config, settings())
    return [advice] if advice else []


# --- ways --------------------------------------------------------------------------------------------


def _lm_ways(plan: Plan) -> Iterator[Way]:
    config = plan.config
    yield [(f"batch.token_budget={size}",) for size in _halves(config.batch.token_budget)]
    yield [("cluster.overlap=false",)] if config.cluster.overlap else []
    yield [("batch.cache_mb=0",)] if config.batch.cache_mb else []
    yield [("model.dtype=bfloat16",)] if plan.dtype == "float32" else []
    more = [count for count in _LM_WORKERS if count > config.cluster.lm_workers]
    if config.lm.sharding == "none" and config.cluster.lm_workers > 1:
        more = [config.cluster.lm_workers, *more]
    sharded = () if config.lm.sharding == "zero3" else ("lm.sharding=zero3",)
    yield [(*sharded, f"cluster.lm_workers={count}") for count in more]
    yield [(f"training.num_edits={size}",) for size in _halves(config.training.num_edits)]
    yield _fewer_layers(config)


def _hypernet_ways(plan: Plan) -> Iterator[Way]:
    config = plan.config
    actors = [count for count in _ACTORS if count > config.cluster.hypernet_actors]
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
