"""All experiments on one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmen.runs.files import atomic_file
from malmen.tune.experiments.cells import Cells
from malmen.tune.experiments.findings import findings
from malmen.tune.experiments.settings import KINDS

REPORT = "report.html"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.55 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: .6rem 0; }
table { font-size: 13px; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; white-space: normal; }
img { max-width: 100%; background: white; }
.paper { border-left: 3px solid #8888; padding-left: .8rem; color: color-mix(in srgb, currentColor 75%, transparent); }
li.no { font-weight: 600; }
"""
_TEXTS = {
    "scaling": (
        "Methods over the number of edits (Figs. 5–8)",
        "The paper edits BERT-base, GPT-2, T5-XL and GPT-J on FEVER and zsRE, up to 16,384 edits, and trains the "
        "hyper-networks anew for each number; here one editor per seed is used for all numbers, and the model and its "
        "data are others unless you named them. What the paper states in numbers (ES / GS / LS): GPT-2, zsRE, 512 "
        "edits: MALMEN 99.7 / 96.1 / 16.5; BERT-base, FEVER, 512 edits: 93.0 / 85.8 / 89.5; GPT-J, zsRE, 8,192 edits: "
        "99.7 / 92.8 / 25.1. Its curves are pictures only.",
    ),
    "ablation": (
        "Ablation (Tables 1 and 2)",
        "In the paper (ES / GS / LS), zsRE on GPT-2, 512 edits: sum 52.2 / 50.7 / 17.0, no regularisation 0 / 0 / 0, "
        "first FC 97.7 / 89.1 / 15.8, all tokens 99.2 / 94.0 / 16.6, MALMEN 99.7 / 96.1 / 16.5. On GPT-J, 8,192 edits: "
        "all tokens 94.0 / 85.5 / 25.9 in 7.2 h, MALMEN 99.7 / 92.8 / 25.1 in 4.4 h. Only the order compares.",
    ),
    "cancellation": (
        "Cancellation (Fig. 9)",
        "In the paper, on GPT-2, the mean residual of least squares is about three orders of magnitude below that of a "
        "sum of shifts. A residual is ‖S*u − d‖ / ‖d‖ of a token in a layer.",
    ),
    "rounds": (
        "Sequential editing",
        "Not in the paper; later work criticises MALMEN there. `union` keeps the facts of all rounds as one set and "
        "solves for all of them, as the endpoint does: the same as at once. `again` edits the edited model, which adds "
        "up shifts that know nothing of each other.",
    ),
    "recipes": (
        "Other settings of MALMEN",
        "Not in the paper: what was tried beyond it. Settings and names are in the experiment's settings below.",
    ),
    "memory": (
        "Memory (Fig. 10)",
        "In the paper, on GPT-2, MEND-style training runs out of a GPU's memory while MALMEN's grows slowly up to "
        "8,192 edits. Here it is the peak of the whole process, the libraries and the model among it.",
    ),
    "failures": ("Failures", "As the paper's appendix shows them: what was asked, what should follow, and what came."),
}  # fmt: skip


SHORT = {"edit_success": "ES", "generalization_success": "GS", "locality_success": "LS"}
COLUMNS = {
    **SHORT, "locality_agreement": "agreement", "score": "harmonic mean",
    "edit_success_generated": "ES gen.", "generalization_success_generated": "GS gen.",
    "locality_success_generated": "LS gen.", "locality_agreement_generated": "agreement gen.",
    "edit_success_ended": "ES ended", "generalization_success_ended": "GS ended", "locality_success_ended": "LS ended",
    "mean_residual": "MR", "training_seconds": "train (s)", "edit_seconds": "edit (s)",
}  # fmt: skip


def write_report(folder: Path) -> Path:
    """From the JSON files of a folder of experiments; the path of the page."""
    results = folder / "results"
    found = {
        kind: json.loads((results / f"{kind}.json").read_text(encoding="utf-8"))
        for kind in KINDS
        if (results / f"{kind}.json").exists()
    }
    about = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    path = folder / REPORT
    atomic_file(path, _page(found, about, results, sorted(Cells(folder).codes())))
    return path


def _page(found: dict[str, Any], about: dict[str, Any], results: Path, codes: Sequence[str]) -> str:
    config, experiment = about["config"], about["experiment"]
    title = f"Editing {config['model']['name']}: MALMEN and its rivals"
    sections = "\n".join(_section(kind, one, results) for kind, one in found.items())
    checks = "".join(
        f'<li class="{"yes" if held else "no"}">{"Holds" if held else "DOES NOT HOLD"}: {html.escape(text)}</li>'
        for text, held in findings(found)
    )
    settings = html.escape(json.dumps({"experiment": experiment, "config": config}, indent=1, ensure_ascii=False))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>Held-out facts, {len(experiment["seeds"])} seeds, {config["training"]["steps"]} steps of meta-training with
{_edits_a_step(config["training"])} edits each. ES, GS and LS are shares of right answer tokens in %,
teacher-forced; “gen.” are whole answers, decoded greedily, “ended” those of them after which the text ends. Agreement
is the share of unrelated tokens that the edited model predicts as the unedited one does, “agreement gen.” that of whole
generated texts. The harmonic mean is of ES, GS, and LS as a share of the unedited
model's. ± is the standard deviation over the seeds {", ".join(map(str, experiment["seeds"]))}.
Measured by {html.escape("; ".join(codes))}.</p>
<h2>What was expected</h2><ul>{checks}</ul>
{sections}
<h2>Settings</h2><details><summary>all of them</summary><pre>{settings}</pre></details>
</body></html>
"""


def _edits_a_step(training: dict[str, Any]) -> str:
    fewest, most = training.get("min_edits"), training["num_edits"]
    return f"{fewest} to {most}" if fewest and fewest < most else f"{most}"


def _section(kind: str, found: dict[str, Any], results: Path) -> str:
    title, paper = _TEXTS[kind]
    picture = results / f"{kind}.svg"
    image = ""
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'
    table = {"failures": _failures, "memory": _memory, "cancellation": _residuals}.get(kind, _scores)(found)
    return f'<h2>{html.escape(title)}</h2>\n{image}\n{table}\n<p class="paper">{html.escape(paper)}</p>'


def _residuals(found: dict[str, Any]) -> str:
    return _scores(found, {"mean_residual": "MR", **SHORT, "locality_agreement": "agreement"})


def _scores(found: dict[str, Any], names: dict[str, str] = COLUMNS) -> str:
    shown = {key: text for key, text in names.items() if any(row.get(key) for row in found["rows"])}
    head = "".join(f"<th>{html.escape(text)}</th>" for text in ("", "edits", *shown.values()))
    body = "".join(_score_row(row, list(shown)) for row in found["rows"])
    return f"<table><tr>{head}</tr>{body}</table>"


def _score_row(row: dict[str, Any], names: list[str]) -> str:
    label = row["label"] + (f", {row['rounds']} rounds, {row['way']}" if row.get("rounds", 1) > 1 else "")
    failed = f'<td class="text" colspan="{len(names)}">failed: {html.escape("; ".join(row["errors"]))}</td>'
    cells = "".join(f"<td>{_number(name, row[name])}</td>" for name in names) if row["seeds"] else failed
    if row["seeds"] and row["errors"]:
        why = html.escape("; ".join(row["errors"]))
        cells += f'<td class="text">{row["seeds"]} of the seeds; the others failed: {why}</td>'
    return f"<tr><td>{html.escape(label)}</td><td>{row['edits']}</td>{cells}</tr>"


def _number(name: str, value: dict[str, Any] | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_seconds"):
        return f"{value['mean']:.1f}"
    if name == "mean_residual":
        return f"{value['mean']:.3g}"
    return f"{100 * value['mean']:.1f} ± {100 * value['deviation']:.1f}"


def _memory(found: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{row['way']}</td><td>{row['edits']}</td><td>{_peak(row)}</td>"
        f"<td>{_megabytes(row['added_mb']) if 'peak_mb' in row else '–'}</td></tr>"
        for row in found["rows"]
    )
    head = "".join(f"<th>{text}</th>" for text in ("way", "edits", "peak (MB)", "added by the step (MB)"))
    return f"<table><tr>{head}</tr>{rows}</table>"


def _peak(row: dict[str, Any]) -> str:
    if "peak_mb" in row:
        return _megabytes(row["peak_mb"])
    return f"more than {row['ran_out']:g} GB" if "ran_out" in row else html.escape(row["error"])


def _megabytes(value: dict[str, Any]) -> str:
    return f"{value['mean']:.0f} ± {value['deviation']:.0f}"


def _failures(found: dict[str, Any]) -> str:
    rows = "".join(
        "<tr>" + "".join(f'<td class="text">{html.escape(str(row[key] or "–"))}</td>' for key in
                         ("label", "what", "prompt", "answer", "before", "after")) + "</tr>"
        for row in found["rows"]
    )  # fmt: skip
    names = ("method", "went wrong", "asked", "should be", "before", "after")
    head = "".join(f'<th class="text">{text}</th>' for text in names)
    forced = any(row.get("forced") for row in found["rows"])
    how = "the most probable token at each place of the answer, given what is before it" if forced else "as generated"
    return f"<p>{found['edits']} edits, the first seed; {how}.</p><table><tr>{head}</tr>{rows}</table>"
