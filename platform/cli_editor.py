"""The commands that use a trained editor: `malmen edit`, `malmen eval`, `malmen generate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from malmen.errors import EditError
from malmen.platform.cli_options import AsJson

EditorFolder = Annotated[
    str,
    typer.Option("--editor", help="a run or checkpoint of `malmen train`, or models:/NAME/VERSION of the registry"),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="the base model, where it lies elsewhere than in training")
]


def edit(
    editor: EditorFolder,
    facts: Annotated[Path, typer.Option(help="facts or records to edit, see docs/data.md")],
    out: Annotated[Path, typer.Option(help="the folder for the edit")] = Path("runs/edit"),
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Apply facts from a file: one change of weights for all of them, reported fact by fact and saved."""
    from malmen.checkpoint import save_edit
    from malmen.checkpoint_files import read_state
    from malmen.data.readers import read_records
    from malmen.evaluate import evaluate
    from malmen.files import check_replaceable
    from malmen.platform.output import err, facts_table, print_json, scores_footer, scores_table
    from malmen.platform.output import out as console

    check_replaceable(out, "edit.json")
    records = read_records(facts, "auto")
    _refuse_contradictions(records)
    folder = _folder(editor)
    lm, trained, config = _load(folder, model)
    with err.status(f"editing {len(records)} facts"):
        solved = trained.edit(lm, [record.edit for record in records])
    with err.status("measuring"):
        evaluation = evaluate(lm, records, solved.shifts, config, generate=generate, residual=solved.mean_residual())
    manifest: dict[str, Any] = {
        "base_model": lm.fingerprint(),
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "editor": {"folder": editor, "step": read_state(folder)["step"]},
        "facts": [asdict(record.edit) for record in records],
        "scores": evaluation.scores(),
    }
    save_edit(out, solved.shifts, manifest)
    if as_json:
        print_json({**evaluation.scores(), "out": str(out), "facts": [asdict(fact) for fact in evaluation.facts]})
        return
    shown = [fact for fact in evaluation.facts if fact.role == "edit"]
    console.print(facts_table(shown[:50], f"{len(shown)} facts" + (", the first 50" if len(shown) > 50 else "")))
    console.print(scores_table(evaluation.scores()))
    console.print(scores_footer(evaluation.scores()), highlight=False)
    err.print(f'The edit is in {out}. Next: malmen generate --edits {out} "a prompt"')


def evaluate(
    editor: EditorFolder,
    records: Annotated[Path | None, typer.Option(help="records to edit; default: the run's validation data")] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="how many at once; default: as in training")] = None,
    sets: Annotated[int, typer.Option(min=1, help="how many disjoint sets of edits to measure one by one")] = 1,
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Edit held-out records at once and measure ES, GS, LS and what goes with them."""
    from malmen.data.readers import read_records
    from malmen.platform.output import err, print_json, scores_footer, scores_table, spread_table
    from malmen.platform.output import out as console
    from malmen.sampling import validation_records
    from malmen.training import evaluate_sets

    lm, trained, config = _load(_folder(editor), model)
    some = read_records(records, "auto") if records else validation_records(config)
    number = edits or config.training.num_edits
    with err.status(f"editing {sets} × {number} records and measuring"):
        found = evaluate_sets(lm, trained, some, config, sets=sets, edits=number, generate=generate)
    if as_json:
        rows = [{**evaluation.scores(), "shift_ratio": evaluation.shift_ratio} for evaluation in found]
        print_json(rows[0] if sets == 1 else {"sets": rows, "mean": mean_scores(rows)})
    elif sets == 1:
        console.print(scores_table(found[0].scores()))
        console.print(scores_footer(found[0].scores()), highlight=False)
    else:
        console.print(spread_table([evaluation.scores() for evaluation in found]))


def generate(
    prompts: Annotated[list[str], typer.Argument(help="what to ask")],
    edits: Annotated[Path, typer.Option(help="a folder of `malmen edit`")],
    model: ModelName = None,
    tokens: Annotated[int, typer.Option(min=1, help="the longest answer")] = 24,
    as_json: AsJson = False,
) -> None:
    """Ask the model before and after an edit, side by side."""
    from rich.table import Table
    from rich.text import Text

    from malmen.checkpoint import load_edit
    from malmen.config import DataConfig, ModelConfig
    from malmen.generate import ask
    from malmen.lm import load_lm
    from malmen.overlay import edited
    from malmen.platform.output import out as console
    from malmen.platform.output import print_json

    _, manifest = load_edit(edits)
    settings = ModelConfig(**manifest["model"])
    lm = load_lm(settings.model_copy(update={"name": model}) if model else settings)
    shifts, _ = load_edit(edits, lm)
    data = DataConfig(**manifest["data"])
    before = ask(lm, prompts, tokens, data)
    with edited(lm, shifts):
        after = ask(lm, prompts, tokens, data)
    if as_json:
        rows = zip(prompts, before, after, strict=True)
        print_json([{"prompt": prompt, "before": old, "after": new} for prompt, old, new in rows])
        return
    table = Table("prompt", "before", "after")
    for row in zip(prompts, before, after, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


def mean_scores(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of every number that all rows have."""
    names = [name for name in rows[0] if all(isinstance(row[name], int | float) for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _folder(editor: str) -> str | Path:
    """Where an editor lies; one of the model registry is fetched."""
    if not editor.startswith("models:/"):
        return editor
    from malmen.platform.registry import download_editor

    return download_editor(editor)


def _load(folder: str | Path, model: str | None) -> tuple[Any, Any, Any]:
    """The base model, the editor trained for it, and its config."""
    from malmen.checkpoint import load_editor
    from malmen.checkpoint_files import read_config
    from malmen.lm import load_lm
    from malmen.platform.output import err

    config = read_config(folder)
    with err.status("loading the model"):
        lm = load_lm(config.model.model_copy(update={"name": model}) if model else config.model)
    return lm, load_editor(folder, lm), config


def _refuse_contradictions(records: list[Any]) -> None:
    answers: dict[str, str] = {}
    for record in records:
        known = answers.setdefault(record.edit.prompt, record.edit.answer)
        if known != record.edit.answer:
            raise EditError(
                f"the facts contradict each other: {record.edit.prompt!r} is to be {known!r} and "
                f"{record.edit.answer!r}; `malmen data check` lists such lines"
            )
