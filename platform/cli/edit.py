"""The commands that edit (`malmen edit`, `eval`, `generate`), and the method and the model that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from malmen.errors import EditError, UsageError
from malmen.measure.protocol import as_records
from malmen.methods.registry import METHODS
from malmen.platform.cli.options import (
    PLACEMENT,
    REGISTRY,
    AsJson,
    Deployed,
    EditFolder,
    EditorFolder,
    Generate,
    InContext,
    Method,
    MethodConfig,
    MethodOverrides,
    ModelName,
    WeightsMethod,
    resolve_config,
)
from malmen.platform.cli.output import err, facts_table, out, print_json, show_scores, spread_table
from malmen.platform.cli.progress import counted, slow_import, status

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.data.records import EditRecord
    from malmen.edit_method import EditMethod
    from malmen.evaluate import Evaluation
    from malmen.lm.model import LanguageModel
    from malmen.lm.overlay import Shifts


def edit(
    facts: Annotated[Path, typer.Option(help="facts or records to edit, see docs/data.md")],
    overrides: MethodOverrides = None,
    editor: EditorFolder = None,
    method: WeightsMethod = None,
    config: MethodConfig = None,
    folder: Annotated[Path, typer.Option("--out", help="the folder for the edit")] = Path("runs/edit"),
    model: ModelName = None,
    generate: Generate = True,
    as_json: AsJson = False,
) -> None:
    """Apply the facts of a file in one change of weights, report each fact, and save the edit."""
    check_method(method, editor, config, overrides or [])
    if method is not None and not METHODS[method].weights:
        raise UsageError(
            f"{method} changes no weights, so there is no edit to save: see `malmen eval --method {method}`"
        )
    slow_import("malmen.training")
    from malmen.data.readers import read_records
    from malmen.data.splits import check_encodable
    from malmen.data.subjects import edits_of
    from malmen.evaluate import OWN_TEXTS, evaluate
    from malmen.lm.model import fact_encoder
    from malmen.runs.checkpoint import save_edit
    from malmen.runs.files import check_replaceable

    check_replaceable(folder, "edit.json")
    with status(f"reading {facts}"):
        records = read_records(facts, "auto")
    _refuse_contradictions(records)
    loaded = load_method(method, editor, config, overrides or [], model)
    lm, settings = loaded.lm, loaded.config
    check_encodable(fact_encoder(lm, settings.data), records)
    with status(f"editing {len(records)} facts"):
        solved = loaded.method.edit(lm, edits_of(records))
    with counted("measuring") as on_progress:
        evaluation = evaluate(
            lm, records, solved.shifts, settings,
            generate=generate, own_texts=OWN_TEXTS, residual=solved.mean_residual(), on_progress=on_progress,
        )  # fmt: skip
    manifest: dict[str, Any] = {
        "base_model": lm.fingerprint(),
        "model": settings.model.model_dump(mode="json"),
        "data": settings.data.model_dump(mode="json"),
        "editor": loaded.about,
        "facts": [asdict(record.edit) for record in records],
        "scores": evaluation.scores(),
        "protocol": as_records(evaluation.protocols()),
    }
    save_edit(folder, solved.shifts, manifest)
    if as_json:
        print_json({**_result(evaluation), "out": str(folder), "facts": [asdict(fact) for fact in evaluation.facts]})
        return
    edits = [fact for fact in evaluation.facts if fact.role == "edit"]
    out.print(facts_table(edits[:50], f"{len(edits)} facts" + (", the first 50" if len(edits) > 50 else "")))
    show_scores(evaluation.scores(), evaluation.protocols())
    err.print(f'The edit is in {folder}. Next: malmen generate --edits {folder} "a prompt"')


def evaluate(
    overrides: MethodOverrides = None,
    editor: EditorFolder = None,
    method: Method = None,
    config: MethodConfig = None,
    records: Annotated[Path | None, typer.Option(help="records to edit; default: the run's validation data")] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="how many at once; default: as in training")] = None,
    sets: Annotated[int, typer.Option(min=1, help="how many disjoint sets of edits to measure one by one")] = 1,
    model: ModelName = None,
    generate: Generate = True,
    in_context: InContext = False,
    deployed: Deployed = False,
    as_json: AsJson = False,
) -> None:
    """Edit held-out records at once and measure how well the edits hold (ES, GS, LS)."""
    check_method(method, editor, config, overrides or [])
    slow_import("malmen.training")
    from malmen.data.readers import read_records
    from malmen.data.splits import validation_records
    from malmen.evaluate import OWN_TEXTS
    from malmen.training import evaluate_sets

    loaded = load_method(method, editor, config, overrides or [], model)
    settings = loaded.config
    with status("reading the records"):
        held_out = read_records(records, "auto") if records else validation_records(settings)
    number = edits or settings.training.eval_edits or settings.training.num_edits
    with counted(f"editing {sets} × {number} records and measuring") as on_progress:
        evaluations = evaluate_sets(
            loaded.lm, loaded.method, held_out, settings,
            sets=sets, edits=number, generate=generate, own_texts=OWN_TEXTS, in_context=in_context, deployed=deployed,
            on_progress=on_progress,
        )  # fmt: skip
    if as_json:
        rows = [_result(evaluation) for evaluation in evaluations]
        print_json(rows[0] if sets == 1 else {"sets": rows, "mean": mean_scores(rows)})
    elif sets == 1:
        show_scores(evaluations[0].scores(), evaluations[0].protocols())
    else:
        out.print(spread_table([evaluation.scores() for evaluation in evaluations], evaluations[0].protocols()))


def generate(
    prompts: Annotated[list[str], typer.Argument(help="the texts to continue")],
    edits: EditFolder,
    model: ModelName = None,
    tokens: Annotated[int, typer.Option(min=1, help="of an answer, at most")] = 24,
    as_json: AsJson = False,
) -> None:
    """Show the model's answers before and after an edit, side by side."""
    slow_import("malmen.lm.generate")
    from malmen.config import DataConfig
    from malmen.lm.generate import ask
    from malmen.lm.overlay import edited

    lm, shifts, manifest = load_edited_model(edits, model)
    data = DataConfig(**manifest["data"])
    with status(f"answering {len(prompts)} prompts"):
        before = ask(lm, prompts, tokens, data)
        with edited(lm, shifts):
            after = ask(lm, prompts, tokens, data)
    rows = list(zip(prompts, before, after, strict=True))
    if as_json:
        print_json([{"prompt": prompt, "before": old, "after": new} for prompt, old, new in rows])
        return
    table = Table("prompt", "before", "after")
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


# --- what they are given ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedMethod:
    """An editing method with its base model, ready to edit."""

    lm: LanguageModel
    method: EditMethod
    config: Config
    about: dict[str, Any]  # for the manifest of an edit


def check_method(method: str | None, editor: str | None, config: str | None, overrides: Sequence[str]) -> None:
    """UsageError for options that contradict each other; reads no file."""
    if method is not None and method not in METHODS:
        raise UsageError(f"unknown method {method!r}; the methods are {', '.join(METHODS)}")
    trained = method is None or METHODS[method].trained
    if trained and editor is None:
        raise UsageError(f"--method {method or 'malmen'} needs a trained editor: --editor RUN")
    only_placement = all(override.startswith(tuple(f"{key}=" for key in PLACEMENT)) for override in overrides)
    if trained and (config or not only_placement):
        raise UsageError(
            "a trained editor brings its own settings: --config and key=value are for other methods, "
            f"except {', '.join(PLACEMENT)}"
        )
    if config and editor:
        raise UsageError("--config and --editor exclude each other: the settings are those of one of them")


def load_method(
    method: str | None, editor: str | None, config: str | None, overrides: Sequence[str], model: str | None
) -> LoadedMethod:
    """Load the base model, and the editor or untrained method that edits it."""
    check_method(method, editor, config, overrides)
    from malmen.config import full_key, load_config, parse_config, read_override, set_key
    from malmen.lm.model import load_lm
    from malmen.runs.checkpoint import load_editor
    from malmen.runs.checkpoint_lookup import read_config, read_state

    folder: str | Path | None = editor
    if editor and editor.startswith(REGISTRY):
        from malmen.platform.tracking.registry import download_editor

        folder = download_editor(editor)
    if folder is None:
        settings = load_config(resolve_config(config or "builtin"), overrides)
    else:
        raw = read_config(folder).model_dump(mode="json")
        for key, value in map(read_override, overrides):
            set_key(raw, full_key(key), value)
        settings = parse_config(raw, "the overrides")
    trained_as = "mend" if settings.editor.aggregation == "sum" else "malmen"
    trained_as = "rledit" if settings.training.trajectory > 1 else trained_as
    make = None if method is None else METHODS[method].make
    if method is not None and make is None and method != trained_as:
        raise UsageError(f"the editor in {editor} was trained as {trained_as}, not as {method}")
    if model:  # an edit's manifest names the model that was loaded
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"name": model})})
    with status("loading the model"):
        lm = load_lm(settings.model)
    if method is None or make is None:
        assert folder is not None
        about = {"method": trained_as, "folder": str(editor), "step": read_state(folder)["step"]}
        return LoadedMethod(lm, load_editor(folder, lm), settings, about)
    about = {"method": method, "settings": METHODS[method].settings(settings)}
    return LoadedMethod(lm, make(lm, settings), settings, about)


def load_edited_model(edits: Path, model: str | None) -> tuple[LanguageModel, Shifts, dict[str, Any]]:
    """The base model of an edit, or `model` in its place; the edit's shifts, and its manifest."""
    from malmen.config import ModelConfig
    from malmen.lm.model import load_lm
    from malmen.runs.checkpoint import load_edit

    _, manifest = load_edit(edits)  # a folder without an edit is refused before the model is loaded
    settings = ModelConfig(**manifest["model"])
    with status("loading the model"):
        lm = load_lm(settings.model_copy(update={"name": model}) if model else settings)
    shifts, _ = load_edit(edits, lm)
    return lm, shifts, manifest


def _result(evaluation: Evaluation) -> dict[str, Any]:
    """One evaluation for JSON: its scores, and how they were obtained."""
    protocol = as_records(evaluation.protocols())
    return {**evaluation.scores(), "shift_ratio": evaluation.shift_ratio, "protocol": protocol}


def mean_scores(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of every number that all rows have."""
    names = [name for name in rows[0] if all(isinstance(row[name], int | float) for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _refuse_contradictions(records: list[EditRecord]) -> None:
    answers: dict[str, str] = {}
    for record in records:
        known = answers.setdefault(record.edit.prompt, record.edit.answer)
        if known != record.edit.answer:
            raise EditError(
                f"the facts contradict each other: {record.edit.prompt!r} is to be {known!r} and "
                f"{record.edit.answer!r}; `malmen data check` lists such lines"
            )
