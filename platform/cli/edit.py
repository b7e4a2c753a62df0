"""The commands that edit: `malmen edit`, `malmen eval`, `malmen generate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from malmen.errors import EditError
from malmen.platform.cli.method_options import ConfigName, EditorFolder, Method, ModelName
from malmen.platform.cli.options import AsJson, Overrides


def edit(
    facts: Annotated[Path, typer.Option(help="facts or records to edit, see docs/data.md")],
    overrides: Overrides = None,
    editor: EditorFolder = None,
    method: Method = None,
    config: ConfigName = None,
    out: Annotated[Path, typer.Option(help="the folder for the edit")] = Path("runs/edit"),
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Apply facts from a file: one change of weights for all of them, reported fact by fact and saved."""
    from malmen.data.readers import read_records
    from malmen.data.splits import check_encodable
    from malmen.data.subjects import edits_of
    from malmen.evaluate import evaluate
    from malmen.lm.model import fact_encoder
    from malmen.platform.cli.method_options import check_method, load_method
    from malmen.platform.cli.output import err, facts_table, print_json, scores_footer, scores_table
    from malmen.platform.cli.output import out as console
    from malmen.runs.checkpoint import save_edit
    from malmen.runs.files import check_replaceable

    check_method(method, editor, config, overrides or [])
    check_replaceable(out, "edit.json")
    records = read_records(facts, "auto")
    _refuse_contradictions(records)
    loaded = load_method(method, editor, config, overrides or [], model)
    lm, settings = loaded.lm, loaded.config
    check_encodable(fact_encoder(lm, settings.data), records)
    with err.status(f"editing {len(records)} facts"):
        solved = loaded.method.edit(lm, edits_of(records))
    with err.status("measuring"):
        evaluation = evaluate(lm, records, solved.shifts, settings, generate=generate, residual=solved.mean_residual())
    manifest: dict[str, Any] = {
        "base_model": lm.fingerprint(),
        "model": settings.model.model_dump(mode="json"),
        "data": settings.data.model_dump(mode="json"),
        "editor": loaded.about,
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
    overrides: Overrides = None,
    editor: EditorFolder = None,
    method: Method = None,
    config: ConfigName = None,
    records: Annotated[Path | None, typer.Option(help="records to edit; default: the run's validation data")] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="how many at once; default: as in training")] = None,
    sets: Annotated[int, typer.Option(min=1, help="how many disjoint sets of edits to measure one by one")] = 1,
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Edit held-out records at once and measure ES, GS, LS and what goes with them."""
    from malmen.data.readers import read_records
    from malmen.data.splits import validation_records
    from malmen.platform.cli.method_options import load_method
    from malmen.platform.cli.output import err, print_json, scores_footer, scores_table, spread_table
    from malmen.platform.cli.output import out as console
    from malmen.training import evaluate_sets

    loaded = load_method(method, editor, config, overrides or [], model)
    lm, settings = loaded.lm, loaded.config
    some = read_records(records, "auto") if records else validation_records(settings)
    number = edits or settings.training.num_edits
    with err.status(f"editing {sets} × {number} records and measuring"):
        found = evaluate_sets(lm, loaded.method, some, settings, sets=sets, edits=number, generate=generate)
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

    from malmen.config import DataConfig, ModelConfig
    from malmen.lm.generate import ask
    from malmen.lm.model import load_lm
    from malmen.lm.overlay import edited
    from malmen.platform.cli.output import out as console
    from malmen.platform.cli.output import print_json
    from malmen.runs.checkpoint import load_edit

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


def _refuse_contradictions(records: list[Any]) -> None:
    answers: dict[str, str] = {}
    for record in records:
        known = answers.setdefault(record.edit.prompt, record.edit.answer)
        if known != record.edit.answer:
            raise EditError(
                f"the facts contradict each other: {record.edit.prompt!r} is to be {known!r} and "
                f"{record.edit.answer!r}; `malmen data check` lists such lines"
            )
