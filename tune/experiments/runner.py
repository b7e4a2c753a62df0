"""Experiments over Ray: one task for each variant and seed. Every cell is a file, so a killed run can be resumed."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from malmen.config import Config
from malmen.data.splits import check_held_out, shared_facts, training_records, validation_records
from malmen.errors import EditError, last_line
from malmen.platform.cluster import connected
from malmen.platform.tracking.tracker import Tracker
from malmen.runs.files import exclusive_folder
from malmen.training import check_enough
from malmen.tune.experiments.cells import Cell, Cells, Group, begin_folder, code_version, groups_of
from malmen.tune.experiments.memory import WAYS, measure_memory
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.settings import KINDS, ExperimentConfig, base_config
from malmen.tune.experiments.work import do_cells
from malmen.tune.follow import ProgressListener


def run_experiments(
    settings: ExperimentConfig, kinds: Collection[str], out: Path, *, address: str | None = None,
    listener: ProgressListener | None = None,
) -> list[Path]:  # fmt: skip
    """Run or resume these experiments in `out`; returns the file of results of each."""
    listener = listener or ProgressListener()
    assert set(kinds) <= set(KINDS), kinds
    config = base_config(settings)
    check_held_out(config)
    folder = out.absolute()
    groups = groups_of(settings, config, kinds)
    for group in groups:
        needed = max(cell.edits for cell in group.cells)
        records = check_enough(validation_records(group.variant.seeded(group.seed)), needed)
    if groups and (shared := shared_facts(config, training_records(config)(0), records)):
        listener.event(shared)
    with exclusive_folder(folder):
        begin_folder(folder, settings, config)
        store = Cells(folder)
        if others := sorted(store.codes() - {code_version()}):
            listener.event(f"{folder} holds measurements of other code: {'; '.join(others)}; this is {code_version()}")
        with Tracker.start(config, str(folder), {"malmen.experiment": ",".join(sorted(kinds))}) as tracker:
            losses = _run_groups(groups, settings, store, config, address, listener)
            if "memory" in kinds:
                _run_memory(settings, config, store, listener)
            written = write_results(settings, config, folder, kinds)
            _log(tracker, [cell for group in groups for cell in group.cells], store)
            if written:
                tracker.log_artifacts(written[0].parent, "results")
    if losses:
        raise EditError(f"{'; '.join(losses)}; the results of the others are in {folder}, the same command tries again")
    return written


def _run_groups(
    groups: Sequence[Group], settings: ExperimentConfig, store: Cells, config: Config, address: str | None,
    listener: ProgressListener,
) -> list[str]:  # fmt: skip
    """Run the groups with open cells as Ray tasks; returns a message for each task that Ray lost."""
    cells = [cell for group in groups for cell in group.cells]
    queue = [group for group in groups if not all(map(store.done, group.cells))]
    listener.progress(sum(map(store.done, cells)), len(cells))
    losses: list[str] = []
    if not queue:
        return losses
    with connected(address, config.cluster):
        task = ray.remote(num_cpus=settings.cpus, num_gpus=_task_gpus(settings), max_retries=2)(do_cells)
        running: dict[Any, Group] = {}
        while queue or running:
            busy = {group.editor for group in running.values()}
            for group in list(queue):
                if group.editor is None or group.editor not in busy:  # of two that share an editor, the second waits
                    busy.add(group.editor)
                    queue.remove(group)
                    running[task.remote(group, settings, store.folder)] = group
            ended, _ = ray.wait(list(running), num_returns=1, timeout=2)
            for reference in ended:
                group = running.pop(reference)
                try:
                    ray.get(reference)
                except RayError as error:
                    losses.append(f"{group}: {last_line(error)}")
                    for cell in group.cells:
                        if not store.get(cell):
                            store.put(cell, {"error": losses[-1]})
                listener.event(f"{group}: ended")
            listener.progress(sum(map(store.done, cells)), len(cells))
    return losses


def _task_gpus(settings: ExperimentConfig) -> float:
    """GPUs for each task; EditError if no node can ever hold one, because Ray would wait for it for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = settings.gpus if settings.gpus is not None else float(any(node.get("GPU", 0) >= 1 for node in nodes))
    if not any(node.get("CPU", 0) >= settings.cpus and node.get("GPU", 0) >= gpus for node in nodes):
        capacities = "; ".join(f"{node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU" for node in nodes)
        raise EditError(f"each task asks for {settings.cpus:g} CPU and {gpus:g} GPU; the nodes have {capacities}")
    return gpus


def _run_memory(settings: ExperimentConfig, config: Config, store: Cells, listener: ProgressListener) -> None:
    """One process of one core for each measurement, as many at a time as cores and memory allow."""
    rows = [row for row in store.memory() if "error" not in row and "seed" in row]  # failures are tried again
    done = {(row["way"], row["edits"], row["seed"]) for row in rows}
    wanted = [(way, edits, seed) for way in WAYS for edits in settings.memory_edits for seed in settings.seeds]
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / settings.memory_gb
    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, int(room))))
    try:
        waiting = [pool.submit(measure_memory, config, *key, settings.memory_gb) for key in wanted if key not in done]
        for measured in as_completed(waiting):
            row = measured.result()
            rows.append({**row, "code": code_version()})
            store.put_memory(rows)
            listener.event(f"memory of {row['edits']} edits, {row['way']}, seed {row['seed']}: measured")
    finally:
        pool.shutdown(cancel_futures=True)  # after an interruption only those under way are awaited


def _log(tracker: Tracker, cells: Sequence[Cell], store: Cells) -> None:
    """Scores by method and seed, over the number of edits."""
    for cell in cells:
        way = "" if cell.rounds == 1 else f"/{cell.rounds} rounds {cell.way}"
        scores = store.get(cell).get("scores", {})
        numbers = {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        if numbers:
            tracker.log(cell.edits, {f"{cell.variant}{way}/seed{cell.seed}/{name}": numbers[name] for name in numbers})
