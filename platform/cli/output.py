"""What the command line prints: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from malmen.metrics import (
    BEFORE,
    BY_TOKENS,
    DEPLOYED_CONTAINED,
    DEPLOYED_EXACT,
    ENDED,
    EXACT,
    FLOOR,
    FOLLOWING,
    GENERATED,
    METRICS,
    Metric,
)
from malmen.runs.files import json_text

if TYPE_CHECKING:
    from malmen.evaluate import FactReport
    from malmen.measure.protocol import Protocol

# No markup: what is printed holds prompts, answers and paths of users.
out = Console(markup=False, highlight=False)
err = Console(stderr=True, markup=False, highlight=False)

_ASKED = {
    "edit": "the edits",
    "equivalent": "rephrasings",
    "unrelated": "unrelated",
    "portability": "what follows",
    "reversal": "reversed",
}
_ALONG = {"own_raw": "raw prompts", "own_chat": "the chat template", "neighbours": "neighbours of the edits"}
_DRIFT = {
    "kl": "KL",
    "kl_p95": "its 95th percentile",
    "agreement": "same token",
    "sure_agreement": "where sure",
    "unchanged_10": "10 tokens unchanged",
    "unchanged_20": "20 tokens",
}
_COUNTED = {BY_TOKENS: "tokens", EXACT: "whole answers", ENDED: "generated, ends there"}
_DEPLOYED = {DEPLOYED_EXACT: "the answer alone", DEPLOYED_CONTAINED: "contained"}
_IN_CONTEXT = {BY_TOKENS: "tokens", EXACT: "whole answers", GENERATED: "generated"}


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json_text(value), end="")


def show(value: Any, text: str, as_json: bool) -> None:
    """A result: as JSON, or in words."""
    if as_json:
        print_json(value)
    else:
        out.print(text, soft_wrap=True)


def numbers_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> Table:
    """A table with names in its first column and numbers in the others."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def show_settings(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Settings (`config.describe_settings`): key, default and meaning."""
    if as_json:
        print_json(list(rows))
        return
    table = Table("setting", "default", "meaning")
    for row in rows:
        default = "" if row["default"] is None else str(row["default"])
        table.add_row(*map(Text, (row["key"], default, row["description"])))
    out.print(table)


def percent(value: float | None) -> str:
    """A share from 0 to 1 in per cent, for a table."""
    return "–" if value is None else f"{100 * value:.1f}"


def scores_table(scores: Mapping[str, Any], protocols: Mapping[str, Protocol] | None = None) -> Table:
    """`Evaluation.scores`: before → after, for each metric and way of counting; how they were obtained below."""
    suffixes = [way for way in _COUNTED if any(scores.get(metric.name + way) is not None for metric in METRICS)]
    following = [metric for metric in FOLLOWING if metric.name in scores]
    rows = [_shares_row(metric, suffixes, scores) for metric in (*METRICS, *following)]
    title = f"{scores['edits']} edits at once: right answers in %, before → after"
    headings = [_COUNTED[suffix] for suffix in suffixes]
    ways = {_COUNTED[way]: (protocols or {}).get(METRICS[0].name + way) for way in suffixes}
    return numbers_table(title, ["asked", *headings], rows, _caption(ways, with_prompt=True))


def _shares_row(metric: Metric, ways: Sequence[str], scores: Mapping[str, Any]) -> list[str]:
    names = [metric.name + way for way in ways]
    cells = [f"{percent(scores.get(name + BEFORE))} → {percent(scores.get(name))}" for name in names]
    return [f"{_ASKED[metric.kind]} ({metric.label})", *cells]


def context_table(scores: Mapping[str, Any], protocols: Mapping[str, Protocol]) -> Table | None:
    """`edits_in_context`: ES behind other text, beside ES alone; a row for each form of prompts and context."""
    prefix = f"{METRICS[0].name}_in_context_"
    contexts = [name for name in protocols if name.startswith(prefix) and not name.endswith((EXACT, GENERATED))]
    if not contexts:
        return None
    ways = [way for way in _IN_CONTEXT if scores.get(contexts[0] + way) is not None]
    rows = []
    for name in contexts:
        cells = [f"{percent(scores.get(name + way + BEFORE))} → {percent(scores.get(name + way))}" for way in ways]
        rows.append((protocols[name].prompt, str(protocols[name].questions), *cells))
    title = "the edits in context: right answers in %, before → after"
    caption = _caption({_IN_CONTEXT[way]: protocols.get(contexts[0] + way) for way in ways})
    return numbers_table(title, ["read", "questions", *(_IN_CONTEXT[way] for way in ways)], rows, caption)


def deployed_table(scores: Mapping[str, Any], protocols: Mapping[str, Protocol]) -> Table | None:
    """`measure_deployed`: ES, GS and LS of the answers that a user gets."""
    ways = [way for way in _DEPLOYED if any(metric.name + way in protocols for metric in METRICS)]
    if not ways:
        return None
    asked = [metric for metric in (*METRICS, *FOLLOWING) if metric.name + ways[0] in protocols]
    columns = {_DEPLOYED[way]: protocols[asked[0].name + way] for way in ways}
    return numbers_table(
        "as deployed: right answers in %, before → after",
        ["asked", *columns],
        [_shares_row(metric, ways, scores) for metric in asked],
        _caption(columns, with_prompt=True),
    )


def _caption(columns: Mapping[str, Protocol | None], *, with_prompt: bool = False) -> str | None:
    """How the numbers of each column were obtained, a line each."""
    known = {heading: protocol for heading, protocol in columns.items() if protocol is not None}
    asked = [f"read: {protocol.prompt}" for protocol in list(known.values())[:1] if with_prompt]
    lines = [f"{heading}: {protocol.decoding}; {protocol.scorer}" for heading, protocol in known.items()]
    return "\n".join([*asked, *lines]) or None


def spread_table(rows: list[dict[str, Any]], protocols: Mapping[str, Protocol] | None = None) -> Table:
    """Several evaluations: mean, least and largest of every score."""
    lines = []
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if values and name != "edits":
            lines.append((name, *(f"{value:.3f}" for value in (fmean(values), min(values), max(values)))))
    title = f"{len(rows)} sets of {rows[0]['edits']} edits"
    named: dict[str, list[str]] = {}
    for name, protocol in (protocols or {}).items():
        named.setdefault(str(replace(protocol, questions=None)), []).append(name)
    caption = "\n".join(f"{', '.join(names)}: {protocol}" for protocol, names in named.items())
    return numbers_table(title, ("score", "mean", "least", "largest"), lines, caption or None)


def scores_footer(scores: Mapping[str, Any]) -> str:
    """The scores that have no value before the edit."""
    parts = [
        ("unrelated tokens predicted as by the unedited model {:.1f} %", "locality_agreement", 100),
        ("unrelated texts generated as by it {:.1f} %", "locality_agreement_generated", 100),
        ("as deployed {:.1f} %", "locality_agreement_deployed", 100),
        ("largest ‖S‖/‖W‖ {:.3f}", "max_shift_ratio", 1),
        ("mean residual {:.3f}", "mean_residual", 1),
    ]
    return " · ".join(
        text.format(factor * scores[name]) for text, name, factor in parts if scores.get(name) is not None
    )


def drift_table(scores: Mapping[str, Any]) -> Table | None:
    """`Evaluation.scores`: how far the edited model drifts along the unedited one's own texts, beside the floor."""
    prefixes = [prefix for prefix in _ALONG if f"{prefix}_kl" in scores]
    if not prefixes:
        return None
    lines = []
    for prefix in prefixes:
        for suffix, label in (("", _ALONG[prefix]), (FLOOR, "  rounding alone")):
            values = [scores.get(f"{prefix}_{name}{suffix}") for name in _DRIFT]
            if values[0] is not None:
                lines.append((label, f"{values[0]:.4f}", f"{values[1]:.4f}", *map(percent, values[2:])))
    title = "the unedited model's own texts, under the edit: KL in nats per token, the rest in %"
    return numbers_table(title, ["after", *_DRIFT.values()], lines)


def show_scores(scores: Mapping[str, Any], protocols: Mapping[str, Protocol] | None = None) -> None:
    """One evaluation as tables and a line below them."""
    out.print(scores_table(scores, protocols))
    known = protocols or {}
    for table in (deployed_table(scores, known), context_table(scores, known), drift_table(scores)):
        if table:
            out.print(table)
    out.print(scores_footer(scores))


def facts_table(facts: list[FactReport], title: str) -> Table:
    """Facts with the model's answers before and after the edit."""
    table = Table(title=title)
    for heading in ("kind", "prompt", "wanted", "before", "after", ""):
        table.add_column(heading, overflow="fold")
    for fact in facts:
        answers = []
        for answer, right in ((fact.before, fact.right_before), (fact.after, fact.right_after)):
            answers.append(answer if answer is not None else "right" if right else "wrong")
        verdict = Text("✓", "green") if fact.right_after else Text("✗", "red")
        # Text, not str: prompts and answers may look like markup.
        table.add_row(*map(Text, (fact.role, fact.prompt, fact.answer, *answers)), verdict)
    return table


def show_training(
    scores: Mapping[str, Any], facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]], as_json: bool
) -> None:
    """The result of a training run: its scores, `facts` about it, and the seconds of its steps."""
    stages = mean_seconds(history)
    if as_json:
        print_json({**scores, **facts, "seconds_per_step": stages})
        return
    show_scores(scores)
    if stages:
        listed = " · ".join(f"{stage} {seconds:.3g}" for stage, seconds in stages.items())
        out.print(f"mean seconds of a step: {listed}", soft_wrap=True)
    where = f"The editor is in {facts['editor']} ({facts['seconds']:.0f} s)"
    registered = f", registered as {facts['registered']}" if facts.get("registered") else ""
    if facts.get("best"):
        err.print(f"An earlier checkpoint has better held-out scores: --editor {facts['editor']}@best", soft_wrap=True)
    err.print(f"{where}{registered}. Next: malmen edit --editor {facts['editor']} --facts FILE", soft_wrap=True)


def mean_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of a step by stage, without the first step, which warms up."""
    steps = [row["seconds"] for row in history if "seconds" in row]
    steps = steps[1:] or steps
    names = dict.fromkeys(stage for row in steps for stage in row)
    return {stage: round(sum(row.get(stage, 0.0) for row in steps) / len(steps), 4) for stage in names}
