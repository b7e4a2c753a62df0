"""A training run's folder: started once, resumed by the same command, never mixed with another run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmen.config import Config, flatten, stored_config
from malmen.errors import EditError
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_config, read_json, read_state
from malmen.runs.files import atomic_file, json_text, sync
from malmen.runs.storage import RunStore

RUN, HISTORY = "run.json", "history.jsonl"

# Settings that may change when a run is resumed: θ does not depend on them.
_FREE_SECTIONS = ("batch.", "lm.", "cluster.", "tracking.", "baselines.")
_PATHS = {"model.name", "data.train", "data.validation"}  # their content is compared by its hash
_FREE = {"training.eval_every", "training.eval_edits", "training.checkpoint_every", "training.keep_checkpoints"}


@dataclass
class RunFolder:
    """A run on disk and how far it has come."""

    store: RunStore
    config: Config
    checkpoint: str | Path | None  # the newest; None before the first
    steps_done: int
    facts: dict[str, Any] = field(default_factory=dict)  # what the run stores about itself, e.g. its MLflow run
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, location: str | Path, config: Config, *, resume: bool = False) -> RunFolder:
        """A new run, or the unfinished one of the same config in this place; `resume` requires one."""
        store = RunStore(location)
        stored = _read_run(store)
        checkpoint = latest_checkpoint(location) if store.checkpoints() else None
        if stored is None:
            if resume:
                raise EditError(f"{store.location} holds no run to resume; leave --resume out to start one")
            if store.exists(HISTORY) or checkpoint:
                raise EditError(f"{store.location} holds files of a run but no {RUN}; choose another --out")
            opened = cls(store, config, None, 0)
        else:
            before = read_config(checkpoint) if checkpoint else stored_config(stored["config"], RUN)
            done = int(read_state(checkpoint)["step"]) if checkpoint else 0
            opened = cls(store, config, checkpoint, done, stored["facts"], _read_history(store))
            if opened.checkpoint or opened.history:
                opened._check_continuable(before, resume)
            elif before != config:  # it failed before its first step: there is nothing to mix
                opened.facts = {}
        store.check_writable()
        return opened

    def _check_continuable(self, before: Config, resume: bool) -> None:
        """EditError if the run was started with another config, or is finished; `resume` continues a finished one."""
        constant, location = self.config.training.schedule == "constant", self.store.location
        free = _FREE | (_PATHS if "data" in self.facts else set()) | ({"training.steps"} if constant else set())
        if changed := changed_settings(before, self.config, free):
            raise EditError(
                f"cannot resume {location} with another config: {', '.join(changed)}; "
                "use the config it was started with, or choose another --out"
            )
        unfinished = self.steps_done == self.config.training.steps and not self.facts.get("finished", True)
        if self.steps_done >= self.config.training.steps and not (resume or unfinished):
            more = ", or raise training.steps to continue it" if constant else ""
            raise EditError(
                f"{location} already holds a finished run of {self.steps_done} steps; choose another --out{more}"
            )

    def begin(self, facts: Mapping[str, Any] | None = None) -> None:
        """Write the config and the facts of the run; before the first call nothing is written."""
        self.facts.update(facts or {})
        content = {"config": self.config.model_dump(mode="json"), "facts": self.facts}
        self.store.write_text(RUN, json_text(content))

    def cut(self, step: int) -> None:
        """Drop the history after this step: a run that is resumed there repeats the later steps."""
        self.history[:] = [row for row in self.history if row["step"] <= step]
        if isinstance(self.store.location, Path) and self.store.exists(HISTORY):
            atomic_file(self.store.location / HISTORY, _lines(self.history))

    def check_data(self, fingerprint: str) -> None:
        """EditError if an unfinished run was started with other data, which would end in another θ."""
        if self.checkpoint and self.facts.get("data", fingerprint) != fingerprint:
            raise EditError(
                f"the data have changed since {self.store.location} was started (fingerprint {self.facts['data']} → "
                f"{fingerprint}): put the old files back, or choose another --out"
            )
        self.facts["data"] = fingerprint

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the history; the next `flush` makes it durable."""
        if isinstance(self.store.location, Path):
            with (self.store.location / HISTORY).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.history.append(row)

    def has_scores(self, step: int) -> bool:
        """Whether the history has an evaluation of this step; a run that was killed may repeat one."""
        return any(row["step"] == step and row.get("scores") for row in self.history)

    def flush(self) -> None:
        """Make the history durable: sync the file on a disk, upload all of it elsewhere."""
        if not isinstance(self.store.location, Path):
            self.store.write_text(HISTORY, _lines(self.history))
        elif self.history:
            sync(self.store.location / HISTORY)


def run_facts(location: str | Path) -> dict[str, Any]:
    """What the run in a folder stores about itself; {} if there is no run."""
    stored = _read_run(RunStore(location))
    return {} if stored is None else dict(stored["facts"])


def run_evaluations(location: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Step and scores of a run's evaluations up to its newest checkpoint: those that resuming does not repeat."""
    store = RunStore(location)
    states = [read_state(store.join(name)) for name in store.checkpoints()]
    by_step = {row["step"]: row["scores"] for row in _read_history(store) if row.get("scores")}
    # A driver that was killed may lack the newest evaluation and, if it was slow, the one before.
    by_step |= {int(state["step"]): state["scores"] for state in states if state["scores"]}
    return [(step, scores) for step, scores in sorted(by_step.items()) if states and step <= states[-1]["step"]]


def _read_run(store: RunStore) -> dict[str, Any] | None:
    if not store.exists(RUN):
        return None
    stored = read_json(store.location, RUN)
    if not {"config", "facts"} <= set(stored):
        raise EditError(f"{store.join(RUN)} is not a run's: expected `config` and `facts`")
    return stored


def changed_settings(before: Config, now: Config, free: Collection[str] = ()) -> list[str]:
    """The settings that would change θ, each with both values; those in `free` may differ."""
    old = flatten(before.model_dump())
    return [
        f"{key} ({old.get(key)!r} → {value!r})"
        for key, value in flatten(now.model_dump()).items()
        if old.get(key) != value and key not in free and not key.startswith(_FREE_SECTIONS)
    ]


def _read_history(store: RunStore) -> list[dict[str, Any]]:
    if not store.exists(HISTORY):
        return []
    rows = []
    for line in store.read_text(HISTORY).splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a killed run may be cut off
            break
    return rows


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
