"""`malmen train`: meta-training on a Ray cluster, or in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from malmen.errors import UsageError
from malmen.methods.registry import METHODS
from malmen.platform.cli.options import Address, AsJson, ConfigName, Overrides, resolve_config
from malmen.platform.cli.output import show_training
from malmen.platform.cli.progress import counted, training_progress

if TYPE_CHECKING:
    from malmen.config import Config


def train(
    config: ConfigName,
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(help="the run's folder, or a storage URL such as s3://bucket/run")] = "runs/train",
    resume: Annotated[bool, typer.Option("--resume", help="fail unless --out holds a run to resume")] = False,
    method: Annotated[
        Literal["malmen", "mend", "rledit"],
        typer.Option(
            help="mend: the same hyper-network, its shifts summed, of all tokens; rledit: trained by editing an edited "
            "model, only with --local"
        ),
    ] = "malmen",
    local: Annotated[bool, typer.Option("--local", help="in this one process, without Ray and MLflow")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Meta-train an editor on a Ray cluster; ends with an evaluation on held-out records.

    The same command again resumes an unfinished run; its editor is the same as without the interruption.
    """
    from malmen.config import load_config
    from malmen.runs.files import exclusive_folder

    settings = load_config(resolve_config(config), overrides or [])
    if own := METHODS[method].training_settings(settings):
        settings = load_config(resolve_config(config), overrides or [], own)
    if local and address:
        raise UsageError("--local and --address exclude each other")
    if local and "://" in out:
        raise UsageError(f"--local writes to a folder; given {out!r}")
    with exclusive_folder(out):
        if local:
            _train_local(settings, Path(out), resume, as_json)
        else:
            _train_platform(settings, out, resume, address, as_json)


def _train_local(settings: Config, out: Path, resume: bool, as_json: bool) -> None:
    with training_progress(settings.training.steps) as progress:
        progress.phase("importing torch and transformers")
        from malmen.data.splits import validation_records
        from malmen.training import evaluate_editor
        from malmen.training import train as run_training

        run = run_training(
            settings, out, resume=resume,
            on_phase=progress.phase, on_step=progress.step, on_evaluation=progress.evaluation,
        )  # fmt: skip
    held_out = validation_records(settings)
    with counted("editing held-out records and measuring") as on_progress:
        scores = evaluate_editor(run.lm, run.editor, held_out, settings, on_progress=on_progress).scores()
    facts = {"seconds": round(run.seconds, 1), "steps": run.editor.steps_done, "editor": str(out)}
    show_training(scores, facts, run.history, as_json)


def _train_platform(settings: Config, out: str, resume: bool, address: str | None, as_json: bool) -> None:
    from malmen.runs.checkpoint_lookup import best_checkpoint

    with training_progress(settings.training.steps) as progress:
        progress.phase("starting Ray")
        from malmen.platform.train import Listener
        from malmen.platform.train import train as run_training

        listener = Listener(progress.step, progress.evaluation, progress.event)
        trained = run_training(settings, out, address=address, resume=resume, listener=listener)
    best = best_checkpoint(out)
    facts: dict[str, Any] = {
        "best": str(best) if str(best) != str(trained.checkpoint) else None,
        "seconds": round(trained.seconds, 1),
        "steps": trained.steps,
        "editor": out,
        "tracking_run": trained.tracking_run,
        "registered": trained.registered.uri if trained.registered else None,
    }
    show_training(trained.scores, facts, trained.history, as_json)
