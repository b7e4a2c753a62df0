"""Experiments over Ray: one task for each variant and seed; what is done is in files, so a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from malmen.config import Config, absolute_paths, load_config, parse_config
from malmen.data.splits import check_held_out, data_fingerprint, shared_facts, training_records, validation_records
from malmen.errors import EditError, UsageError
from malmen.platform.cli.options import resolve_config
from malmen.platform.cluster import connected
from malmen.platform.tracking.tracker import Tracker
from malmen.runs.files import atomic_file, exclusive_folder
from malmen.training import check_enough
from malmen.tune.experiments.cells import MEMORY, Cell, Cells, cells_of, code_version
from malmen.tune.experiments.memory import WAYS, measure_memory
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.settings import KINDS, ExperimentConfig
from malmen.tune.experiments.variants import Variant, all_variants
from malmen.tune.experiments.work import do_cells

_ABOUT = "experiment.json"
# What may differ when a folder is gone on with: no number depends on it.
_FREE = (
    "experiment.cpus", "experiment.gpus", "experiment.settings", "experiment.recipes", "experiment.config",
    "experiment.seeds", "experiment.methods", "experiment.edits", "experiment.ablations", "experiment.ablation_edits",
    "experiment.rounds", "experiment.memory_edits",  # which cells there are
    "config.cluster.", "config.tracking.", "config.batch.", "config.baselines.memit.cache_dir",
)  # fmt: skip


@dataclass
class ExperimentListener:
    """Hears what happens: how many pieces there are and are done, and remarks."""

    progress: Callable[[int, int], None] = lambda done, total: None
    event: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Group:
    """The cells of one variant and seed; they share an editor."""

    variant: Variant
    seed: int
    cells: tuple[Cell, ...]

    @property
    def editor(self) -> str | None:
        """The folder of its editor."""
        return self.variant.run_name(self.seed) if self.variant.trained else None


def run_experiments(
    settings: ExperimentConfig, kinds: Sequence[str], out: Path, *, address: str | None = None,
    listener: ExperimentListener | None = None,
) -> list[Path]:  # fmt: skip
    """Do these experiments in `out`, or go on with them; gives the file of each with its numbers."""
    listener, wanted = listener or ExperimentListener(), set(kinds)
    assert wanted <= set(KINDS), kinds
    config = base_config(settings)
    check_held_out(config)
    folder = out.absolute()
    groups = [
        Group(variant, seed, tuple(cells_of(variant, seed, settings, wanted)))
        for variant in all_variants(settings, config, wanted)
        for seed in settings.seeds
    ]
    groups = [group for group in groups if group.cells]
    for group in groups:
        needed = max(cell.edits for cell in group.cells)
        asked = check_enough(validation_records(group.variant.seeded(group.seed)), needed)
    if groups and (shared := shared_facts(config, training_records(config)(0), asked)):
        listener.event(shared)
    with exclusive_folder(folder):
        return _run(settings, wanted, config, folder, groups, address, listener)


def _run(
    settings: ExperimentConfig, wanted: set[str], config: Config, folder: Path, groups: Sequence[Group],
    address: str | None, listener: ExperimentListener,
) -> list[Path]:  # fmt: skip
    begin_folder(folder, settings, config)
    if others := sorted(Cells(folder).codes() - {code_version()}):
        listener.event(f"{folder} holds measurements of other code: {'; '.join(others)}; this is {code_version()}")
    with Tracker.start(config, str(folder), {"malmen.experiment": ",".join(sorted(wanted))}) as tracker:
        lost = _run_groups(groups, settings, folder, config, address, listener)
        if "memory" in wanted:
            _run_memory(settings, config, folder, listener)
        written = write_results(settings, config, folder, wanted)
        _log(tracker, groups, folder, written)
    if lost:
        raise EditError(f"{'; '.join(lost)}; the results of the others are in {folder}, the same command tries again")
    return written


def base_config(settings: ExperimentConfig) -> Config:
    """What all variants have in common; files of data by their whole paths, because tasks run elsewhere."""
    config = load_config(resolve_config(settings.config), (), settings.settings)
    raw = absolute_paths(config).model_dump(mode="json")
    memit = raw["baselines"]["memit"]
    for key in ("cache_dir", "corpus"):
        memit[key] = memit[key] and str(Path(memit[key]).absolute())
    return parse_config(raw, settings.config)


def begin_folder(folder: Path, settings: ExperimentConfig, config: Config) -> None:
    """The folder belongs to one set of settings: numbers of another would be mixed with them.

    Those of other code are kept (it may differ in a comment), but that is told, and stands in the report.
    """
    about: dict[str, Any] = {
        "experiment": settings.model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
        "data": data_fingerprint(config),
        "corpus": _corpus_hash(config),
    }
    path = folder / _ABOUT
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        known = ExperimentConfig.model_validate(before["experiment"])
        old = _flat({
            "experiment": known.model_dump(mode="json"),
            "config": parse_config(before["config"], _ABOUT).model_dump(mode="json"),
            "data": before.get("data", about["data"]),
            "corpus": before.get("corpus", about["corpus"]),
        })  # fmt: skip
        changed = [key for key, value in _flat(about).items() if old.get(key) != value and not key.startswith(_FREE)]
        changed += [
            f"recipe {name}" for name, recipe in settings.recipes.items() if known.recipes.get(name, recipe) != recipe
        ]
        if changed:
            raise UsageError(f"{folder} holds experiments with another {', '.join(changed)}; choose another --out")
        about["experiment"]["recipes"] = {**known.recipes, **settings.recipes}
        atomic_file(path, json.dumps(about, indent=1) + "\n")
        return
    if folder.exists() and any(not path.name.startswith(".writing-") for path in folder.iterdir()):
        raise UsageError(f"{folder} holds something else: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_file(path, json.dumps(about, indent=1) + "\n")


def _corpus_hash(config: Config) -> str | None:
    """Of the text that MEMIT takes its moments from."""
    corpus = config.baselines.memit.corpus
    if corpus is None:
        return None
    try:
        with open(corpus, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise EditError(f"cannot read the corpus {corpus}: {error.strerror}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _run_groups(
    groups: Sequence[Group], settings: ExperimentConfig, folder: Path, config: Config, address: str | None,
    listener: ExperimentListener,
) -> list[str]:  # fmt: skip
    """Gives what was lost: tasks that ended otherwise than by a result or an error of the edit."""
    store, cells = Cells(folder), [cell for group in groups for cell in group.cells]
    waiting = [group for group in groups if not all(map(store.done, group.cells))]
    listener.progress(sum(map(store.done, cells)), len(cells))
    lost: list[str] = []
    if not waiting:
        return lost
    with connected(address, config.cluster):
        gpus = _task_gpus(settings)
        task = ray.remote(num_cpus=settings.cpus, num_gpus=gpus, max_retries=2)(do_cells)
        running: dict[Any, Group] = {}
        queue = list(waiting)
        while queue or running:
            for group in _startable(queue, list(running.values())):
                queue.remove(group)
                reference = task.remote(group.variant, group.seed, group.cells, settings, folder)
                running[reference] = group
            ended, _ = ray.wait(list(running), num_returns=1, timeout=2)
            for reference in ended:
                group = running.pop(reference)
                try:
                    ray.get(reference)
                except RayError as error:
                    why = f"{group.variant.label()}, seed {group.seed}: {str(error).strip().splitlines()[-1]}"
                    lost.append(why)
                    for cell in group.cells:
                        if store.get(cell) is None:
                            store.put(cell, {"error": why})
                listener.event(f"{group.variant.label()}, seed {group.seed}: ended")
            listener.progress(sum(map(store.done, cells)), len(cells))
    return lost


def _task_gpus(settings: ExperimentConfig) -> float:
    """GPUs for each task; EditError where no node could ever hold one, because Ray would wait for it for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = settings.gpus if settings.gpus is not None else float(any(node.get("GPU", 0) >= 1 for node in nodes))
    if not any(node.get("CPU", 0) >= settings.cpus and node.get("GPU", 0) >= gpus for node in nodes):
        there = "; ".join(f"{node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU" for node in nodes)
        raise EditError(f"each task asks for {settings.cpus:g} CPU and {gpus:g} GPU; the cluster's nodes have {there}")
    return gpus


def _startable(queue: Sequence[Group], running: Sequence[Group]) -> list[Group]:
    """Two groups that come to the same editor would train it twice at the same time: the second waits for the first."""
    busy = {group.editor for group in running if group.editor}
    found = []
    for group in queue:
        if group.editor not in busy:
            found.append(group)
        if group.editor:
            busy.add(group.editor)
    return found


def _run_memory(settings: ExperimentConfig, config: Config, folder: Path, listener: ExperimentListener) -> None:
    """Each in a process of its own, as many at once as there are cores and memory for; they use one core each."""
    path = folder / "cells" / MEMORY
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [row for row in rows if "error" not in row and "seed" in row]  # what failed is tried again
    done = {(row["way"], row["edits"], row["seed"]) for row in rows}
    asked = [(way, edits, seed) for way in WAYS for edits in settings.memory_edits for seed in settings.seeds]
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / settings.memory_gb
    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, int(room))))
    try:
        waiting = [pool.submit(measure_memory, config, *one, settings.memory_gb) for one in asked if one not in done]
        for measured in as_completed(waiting):
            row = measured.result()
            rows.append({**row, "code": code_version()})
            atomic_file(path, json.dumps(rows, indent=1) + "\n")
            listener.event(f"memory of {row['edits']} edits, {row['way']}, seed {row['seed']}: measured")
    finally:
        pool.shutdown(cancel_futures=True)  # who interrupts waits for those under way, not for all


def _log(tracker: Tracker, groups: Sequence[Group], folder: Path, written: Sequence[Path]) -> None:
    """Scores by method and seed, over the number of edits; the files as artifacts."""
    store = Cells(folder)
    for group in groups:
        for cell in group.cells:
            found = store.get(cell)
            if found and "scores" in found:
                way = "" if cell.rounds == 1 else f"/{cell.rounds} rounds {cell.way}"
                prefix = f"{cell.variant}{way}/seed{cell.seed}"
                numbers = {name: value for name, value in found["scores"].items() if isinstance(value, int | float)}
                tracker.log(cell.edits, {f"{prefix}/{name}": float(value) for name, value in numbers.items()})
    if written:
        tracker.log_artifacts(written[0].parent, "results")
