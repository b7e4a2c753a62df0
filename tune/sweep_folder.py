"""A sweep on disk: its settings and the record of each trial. A sweep resumes from these, not from Ray Tune's notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from malmen.config import Config, stored_config
from malmen.errors import EditError
from malmen.runs.files import write_json
from malmen.runs.run_folder import changed_settings
from malmen.tune.settings import Params, SweepConfig, parse_sweep

SWEEP, TRIALS, TRIAL = "sweep.json", "trials", "trial.json"

Status = Literal["planned", "finished", "stopped", "failed"]

# These may change when a sweep is resumed: none of them changes a trial that exists.
_FREE = {"trials", "concurrent", "trial_seconds", "retrain_steps", "alias"}


@dataclass(frozen=True)
class Judgement:
    """One evaluation of a trial on held-out records."""

    step: int
    score: float
    scores: dict[str, Any]
    seconds: float  # since the trial began, over all its attempts


@dataclass(frozen=True)
class TrialRecord:
    """The state of a trial. `planned` ones are to be run or resumed."""

    number: int
    params: Params
    status: Status = "planned"
    judgements: tuple[Judgement, ...] = ()
    why: str = ""  # the trial was stopped or has failed
    tracking_run: str | None = None
    seconds_per_step: dict[str, float] = field(default_factory=dict)  # by stage

    @property
    def ended(self) -> bool:
        """Whether the trial finished, was stopped or failed."""
        return self.status != "planned"

    @property
    def last(self) -> Judgement | None:
        """The newest evaluation."""
        return self.judgements[-1] if self.judgements else None

    def judged(self, judgement: Judgement) -> TrialRecord:
        """This record with one more evaluation."""
        return replace(self, judgements=(*self.judgements, judgement))


class SweepFolder:
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cache(self) -> Path:
        """Where the trials share the frozen LM's work."""
        return self.path / "cache"

    def trial_path(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.path / TRIALS / f"trial-{number:04d}"

    def begin(self, base: Config, sweep: SweepConfig, data: str | None = None) -> dict[str, Any]:
        """Create the sweep, or open the unfinished one of the same config, space and data (its fingerprint); the facts
        noted of it."""
        if (self.path / SWEEP).exists():
            before_base, before_sweep, facts = self.load()
            old, new = before_sweep.model_dump(), sweep.model_dump()
            changed = [f"sweep.{name}" for name in new if name not in _FREE and old[name] != new[name]]
            changed += changed_settings(before_base, base)
            if data and facts.setdefault("data", data) != data:
                changed.append(f"data (fingerprint {facts['data']} → {data})")
            if changed:
                raise EditError(
                    f"cannot resume the sweep in {self.path}: it was started with another {', '.join(changed)}; "
                    "use the settings it was started with, or choose another --out"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise EditError(f"{self.path} is not empty and holds no {SWEEP}: it is not a sweep; choose another --out")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            facts = {"data": data} if data else {}
        self.save(base, sweep, facts)
        return facts

    def save(self, base: Config, sweep: SweepConfig, facts: Mapping[str, Any]) -> None:
        """Write the sweep's settings, and the facts noted of it."""
        content = {"config": base.model_dump(mode="json"), "sweep": sweep.model_dump(mode="json"), "facts": dict(facts)}
        write_json(self.path / SWEEP, content)

    def load(self) -> tuple[Config, SweepConfig, dict[str, Any]]:
        """Read what `save` wrote."""
        file = self.path / SWEEP
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return stored_config(content["config"], SWEEP), parse_sweep(content["sweep"], SWEEP), content["facts"]
        except OSError as error:
            raise EditError(f"{self.path} holds no sweep: cannot read {SWEEP} ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EditError(f"{file} is not the file of a sweep: {error}") from error

    def put(self, trial: TrialRecord) -> None:
        """Write the record of a trial."""
        file = self.trial_path(trial.number) / TRIAL
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(trial))

    def get(self, number: int) -> TrialRecord | None:
        """Read the record of a trial; None if no trial has this number."""
        file = self.trial_path(number) / TRIAL
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            judgements = tuple(Judgement(**row) for row in content.pop("judgements"))
            return TrialRecord(**content, judgements=judgements)
        except (ValueError, TypeError, KeyError) as error:
            raise EditError(
                f"{file} is not the record of a trial: {error}; expected {[f.name for f in fields(TrialRecord)]}"
            ) from error

    def trials(self) -> list[TrialRecord]:
        """All trials so far, in the order of their numbers."""
        trials: list[TrialRecord] = []
        while (trial := self.get(len(trials))) is not None:
            trials.append(trial)
        return trials
