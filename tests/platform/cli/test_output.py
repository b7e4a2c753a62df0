"""What people read: texts of users and models are printed as they are, also where they look like markup."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from malmen.config import DataConfig, ModelConfig
from malmen.evaluate import Evaluation, FactReport, Success
from malmen.lm.model import load_lm
from malmen.measure.protocol import Protocol
from malmen.platform.cli.output import (
    context_table,
    deployed_table,
    drift_table,
    facts_table,
    percent,
    scores_footer,
    scores_table,
    spread_table,
)
from malmen.runs.checkpoint import save_edit

Run = Callable[..., tuple[int, str, str]]
MARKUP = ["[/INST] [bold]x", "[red]y[/]", ":smile: [link=z]", "\\[a] [/"]


def _printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=240, color_system=None)
    console.print(renderable, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("text", MARKUP)
@pytest.mark.parametrize("generated", [True, False])
def test_a_table_of_facts_prints_texts_literally(text: str, generated: bool) -> None:
    said = {"before": f"old {text}", "after": f"new {text}"} if generated else {}
    fact = FactReport("edit", f"asked {text}", f"wanted {text}", False, True, **said)
    printed = _printed(facts_table([fact], "one fact"))
    for word in ("asked", "wanted", *(("old", "new") if generated else ())):
        assert f"{word} {text}" in printed
    assert ("wrong" in printed) is not generated
    assert "✓" in printed


@pytest.mark.slow
def test_generated_answers_are_printed_literally(malmen: Run, tmp_path: Path) -> None:
    lm = load_lm("builtin")
    manifest = {
        "base_model": lm.fingerprint(),
        "model": ModelConfig().model_dump(mode="json"),
        "data": DataConfig().model_dump(mode="json"),
    }
    save_edit(tmp_path / "edit", {"transformer.h.5.mlp.c_proj": torch.zeros(160, 640)}, manifest)
    code, out, err = malmen("generate", *MARKUP, "--edits", tmp_path / "edit", "--tokens", 3)
    assert (code, "Traceback" in err) == (0, False)
    for text in MARKUP:
        assert text in out


@pytest.mark.slow
def test_edited_facts_are_printed_literally(malmen: Run, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": "[/b]"}) + "\n" for text in MARKUP))
    code, out, _ = malmen("edit", "--editor", trained, "--facts", file, "--out", tmp_path / "edit", "--no-generate")
    assert code == 0
    for text in (*MARKUP, "[/b]"):
        assert text in out


@pytest.mark.slow
def test_a_folder_whose_name_looks_like_markup_is_named_literally(malmen: Run, trained: Path, facts: Path) -> None:
    folder = facts.parent / "[/b] edit"
    code, _, err = malmen("edit", "--editor", trained, "--facts", facts, "--out", folder, "--no-generate")
    assert code == 0
    assert "[/b] edit" in " ".join(err.split())


def test_what_was_not_measured_is_a_dash() -> None:
    assert (percent(None), percent(0.5)) == ("–", "50.0")
    nothing = Success(None, None, None, None)
    table = {"edit": Success(0.25, 0.0, None, None), "equivalent": nothing, "unrelated": nothing}
    evaluation = Evaluation(3, table, table, None, None, None, {"a": 0.1, "b": 0.2})
    printed = _printed(scores_table(evaluation.scores()))
    assert "25.0 → 25.0" in printed
    assert "– → –" in printed
    assert scores_footer(evaluation.scores()) == "largest ‖S‖/‖W‖ 0.200"


def test_several_evaluations_are_shown_by_mean_least_and_largest() -> None:
    rows = [{"edits": 10, "a": 0.25, "b": None}, {"edits": 10, "a": 0.75, "b": None}]
    printed = _printed(spread_table(rows))
    assert "2 sets of 10 edits" in printed
    assert printed.split("│")[1:5] == [" a     ", " 0.500 ", " 0.250 ", "   0.750 "]


def test_tables_of_the_yardsticks_state_how_their_numbers_were_obtained() -> None:
    measure = Protocol("the raw prompt behind x", "decoded so", "scored so", 7)
    deployed = ("edit_success_deployed_exact", "portability_success_deployed_exact")
    protocols = dict.fromkeys(("edit_success_in_context_raw_neutral", *deployed), measure)
    scores = dict.fromkeys((f"{name}{when}" for name in protocols for when in ("", "_before")), 0.5)
    tables = {
        "the raw prompt behind x": context_table(scores, protocols),
        "what follows": deployed_table(scores, protocols),
    }
    for label, table in tables.items():
        assert table is not None
        printed = _printed(table)
        assert label in printed and "50.0 → 50.0" in printed and "decoded so; scored so" in printed
    assert context_table(scores, {}) is None and deployed_table(scores, {}) is None
    names = ("kl", "kl_p95", "agreement", "sure_agreement", "unchanged_10", "unchanged_20")
    drift = drift_table({f"neighbours_{name}": 0.25 for name in names})
    assert drift is not None and "neighbours of the edits" in _printed(drift) and drift_table(scores) is None
