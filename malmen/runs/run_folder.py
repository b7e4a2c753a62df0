"""A training run's folder: started once, gone on with by the same command, never mixed with another run's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmen.config import Config, parse_config
from malmen.errors import EditError
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_config, read_state
from malmen.runs.files import atomic_file, sync
from malmen.runs.storage import RunStore

RUN, HISTORY = "run.json", "history.jsonl"

# What may change between a run and its resumption without changing θ.
_FREE_SECTIONS = ("batch.", "lm.", "cluster.", "tracking.", "baselines.")
_PATHS = {"model.name", "data.train", "data.validation"}  # what they lead to is compared by its hash
_FREE = {"training.eval_every", "training.eval_edits", "training.checkpoint_every", "training.keep_checkpoints"}


@dataclass
class RunFolder:
    """Where a run stands."""

    store: RunStore
    config: Config
    checkpoint: str | Path | None  # the newest, if there is any
    steps_done: int
    facts: dict[str, Any] = field(default_factory=dict)  # what the run noted of itself, e.g. its MLflow run
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, location: str | Path, config: Config, *, resume: bool = False) -> RunFolder:
        """A new run, or the unfinished one of the same config that is there. `resume` says that there must be one."""
        store = RunStore(location)
        found = _read_run(store)
        if found is None:
            if resume:
                raise EditError(f"{store.location} holds no run to resume; leave --resume out to start one")
            if store.exists(HISTORY) or store.checkpoints():
                raise EditError(f"{store.location} holds files of a run but no {RUN}; choose another --out")
            store.check_writable()
            return cls(store, config, None, 0)
        names = store.checkpoints()
        checkpoint = latest_checkpoint(location) if names else None
        history = _read_history(store)
        if not checkpoint and not history:  # it failed before its first step: nothing there to be mixed up
            store.check_writable()
            same = parse_config(found["config"], RUN) == config
            return cls(store, config, None, 0, found["facts"] if same else {})
        before = read_config(checkpoint) if checkpoint else parse_config(found["config"], RUN)
        _check_same(store, before, config, _PATHS if "data" in found["facts"] else set())
        done = int(read_state(checkpoint)["step"]) if checkpoint else 0
        unfinished = done == config.training.steps and not found["facts"].get("finished", True)
        if done >= config.training.steps and not (resume or unfinished):
            more = ", or raise training.steps to go on with it" if config.training.schedule == "constant" else ""
            raise EditError(
                f"{store.location} already holds a finished run of {done} steps; choose another --out{more}"
            )
        store.check_writable()
        return cls(store, config, checkpoint, done, found["facts"], history)

    def begin(self, facts: Mapping[str, Any] | None = None) -> None:
        """From here on the folder holds this run, with what it notes of itself; nothing was written before."""
        self.facts.update(facts or {})
        content = {"config": self.config.model_dump(mode="json"), "facts": self.facts}
        self.store.write_text(RUN, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def cut(self, step: int) -> None:
        """The run goes on from this step: what the history has of later ones will happen again."""
        self.history[:] = [row for row in self.history if row["step"] <= step]
        if isinstance(self.store.location, Path) and self.store.exists(HISTORY):
            atomic_file(self.store.location / HISTORY, _lines(self.history))

    def check_data(self, fingerprint: str) -> None:
        """A run that is under way goes on with the data it was begun with: others would end in another θ."""
        if self.checkpoint and self.facts.get("data", fingerprint) != fingerprint:
            raise EditError(
                f"the data have changed since {self.store.location} was begun (fingerprint {self.facts['data']} → "
                f"{fingerprint}): put the old files back, or choose another --out"
            )
        self.facts["data"] = fingerprint

    def add(self, row: dict[str, Any]) -> None:
        """A row of the history. It is there for ever with the next `flush`."""
        if isinstance(self.store.location, Path):
            with (self.store.location / HISTORY).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.history.append(row)

    def has_scores(self, step: int) -> bool:
        """Whether the history has an evaluation of this step; where a run was killed, one is made again."""
        return any(row["step"] == step and row.get("scores") for row in self.history)

    def flush(self) -> None:
        """Write the whole history where it cannot be appended to; on a disk, see that it outlives the machine."""
        if not isinstance(self.store.location, Path):
            self.store.write_text(HISTORY, _lines(self.history))
        elif self.history:
            sync(self.store.location / HISTORY)


def run_facts(location: str | Path) -> dict[str, Any]:
    """What the run in a folder has noted of itself; nothing where there is none."""
    found = _read_run(RunStore(location))
    return {} if found is None else dict(found["facts"])


def run_evaluations(location: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """The evaluations of the run in a folder up to its newest checkpoint: those that it will not make again."""
    store = RunStore(location)
    states = [read_state(store.join(name)) for name in store.checkpoints()]
    found = {row["step"]: row["scores"] for row in _read_history(store) if row.get("scores")}
    # A driver that was killed may not have heard of the newest, nor, if it was slow, of the one before.
    found |= {int(state["step"]): state["scores"] for state in states if state["scores"]}
    return [(step, scores) for step, scores in sorted(found.items()) if states and step <= states[-1]["step"]]


def _read_run(store: RunStore) -> dict[str, Any] | None:
    if not store.exists(RUN):
        return None
    try:
        found = json.loads(store.read_text(RUN))
    except ValueError as error:
        raise EditError(f"{store.join(RUN)} is not JSON: {error}") from error
    if not isinstance(found, dict) or not {"config", "facts"} <= set(found):
        raise EditError(f"{store.join(RUN)} is not a run's: expected `config` and `facts`")
    return found


def _check_same(store: RunStore, before: Config, now: Config, also_free: set[str]) -> None:
    free = _FREE | also_free | ({"training.steps"} if now.training.schedule == "constant" else set())
    if changed := changed_settings(before, now, free):
        raise EditError(
            f"cannot resume {store.location} with another config: {', '.join(changed)}; "
            "use the config it was started with, or choose another --out"
        )


def changed_settings(before: Config, now: Config, free: Collection[str] = ()) -> list[str]:
    """The settings, each with both values, by which another θ would come out; those in `free` may differ."""
    old = _flat(before.model_dump())
    return [
        f"{key} ({old.get(key)!r} → {value!r})"
        for key, value in _flat(now.model_dump()).items()
        if old.get(key) != value and key not in free and not key.startswith(_FREE_SECTIONS)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


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
