"""A plan as tables: memory of each role, normal equations, bytes moved, stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from malmen.config import Config
from malmen.platform.cli.output import err, out, print_json
from malmen.platform.plan.advice import Advice, advise
from malmen.platform.plan.memory import GB, MB, Role
from malmen.platform.plan.planner import Plan, Planner, PlanOptions

_MOVED = {
    "traces": "traces, to the actors",
    "shifts": "shifts, to every LM worker",
    "shift_grads": "shift gradients, to the actors",
    "shift_grad_sum": "sum of shift gradients over LM workers",
    "solve": "between actors that share a layer",
    "theta_grads": "sum of θ's gradient over actors",
    "weights": "weights gathered by ZeRO-3",
}


def run_plan(config: Config, options: PlanOptions, as_json: bool) -> bool:
    """Print a plan, and changes that would make it fit if it does not; whether it fits."""
    planner = Planner(options)
    with err.status("rehearsing a step"):
        plan = planner.plan(config)
    with err.status("looking for settings that fit"):
        advice = advise(planner, plan)
    if as_json:
        print_json({**plan.as_dict(), "advice": [asdict(way) for way in advice]})
    else:
        show_plan(out, plan, advice)
    return plan.fits


def show_plan(console: Console, plan: Plan, advice: Sequence[Advice]) -> None:
    """All tables, the assumptions, and the verdict last."""
    config = plan.config
    console.print(
        f"{config.model.name}: {plan.parameters / 1e9:.3g} B parameters in {plan.dtype}, {len(plan.layers)} edited "
        f"layers; a step has {config.training.num_edits} edits ({plan.edit_tokens} traced tokens a layer) and "
        f"{plan.facts} facts in all",
        highlight=False,
        soft_wrap=True,
    )
    for role in (plan.lm, plan.hypernet):
        console.print(_role_table(role))
    if plan.equations:
        console.print(_equation_table(plan))
    console.print(_moved_table(plan))
    console.print(_stage_table(plan))
    for line in plan.assumptions:
        console.print(f"· {line}", highlight=False, soft_wrap=True)
    for line in _verdict(plan, advice):
        console.print(line, highlight=False, soft_wrap=True)


def size(count: float) -> str:
    """Bytes for a table."""
    return f"{count / GB:.2f} GB" if count >= GB else f"{count / MB:.1f} MB"


def seconds(value: float) -> str:
    """A duration for a table."""
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.3g} s"


def _role_table(role: Role) -> Table:
    times = f"{role.processes} × " if role.processes > 1 else ""
    where = "GPU" if role.device == "cuda" else "CPU"
    table = Table(
        title=f"{times}{role.name} on {where}: {size(role.total)} of {size(role.limit)}", title_justify="left"
    )
    table.add_column("held at the peak, by one process")
    table.add_column("", justify="right")
    for item in role.items:
        table.add_row(item.name, size(item.bytes))
    return table


def _equation_table(plan: Plan) -> Table:
    table = Table(title="normal equation of each layer, in float64", title_justify="left")
    for heading in ("layer", "form", "matrix", "gram", "factor kept"):
        table.add_column(heading, justify="left" if heading in ("layer", "form") else "right")
    for equation in plan.equations:
        matrix = f"{equation.size} × {equation.size}"
        table.add_row(equation.layer, equation.form, matrix, size(equation.gram), size(equation.factor))
    return table


def _moved_table(plan: Plan) -> Table:
    total = sum(getattr(plan.transfers, name) for name in _MOVED)
    table = Table(title=f"moved in a step: {size(total)}", title_justify="left")
    table.add_column("between processes")
    table.add_column("", justify="right")
    for name, label in _MOVED.items():
        if getattr(plan.transfers, name):
            table.add_row(label, size(getattr(plan.transfers, name)))
    return table


def _stage_table(plan: Plan) -> Table:
    run = plan.step_seconds * plan.config.training.steps
    title = f"a step: {seconds(plan.step_seconds)}; {plan.config.training.steps} steps: {seconds(run)}"
    table = Table(title=title, title_justify="left")
    table.add_column("stage, one process")
    for heading in ("GFLOP", "moved", "expected"):
        table.add_column(heading, justify="right")
    for stage in plan.stages:
        flops = f"{stage.flops / 1e9:,.1f}" if stage.flops else ""
        table.add_row(stage.name, flops, size(stage.moved) if stage.moved else "", seconds(stage.seconds))
    return table


def _verdict(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    lines = []
    for role in (plan.lm, plan.hypernet):
        if not role.fits:
            lines.append(f"Each {role.name} needs {size(role.total)} and has {size(role.limit)}: it does not fit.")
    if plan.machine and plan.machine[0] > plan.machine[1]:
        lines.append(
            f"All processes on this machine need {size(plan.machine[0])} and it has {size(plan.machine[1])}: they do "
            "not fit together."
        )
    if plan.fits:
        return ["It fits."]
    for way in advice:
        needs = f"LM worker {size(way.lm)}, hypernet actor {size(way.hypernet)}"
        lines.append(f"It fits with {' '.join(way.settings)} ({needs}).")
    if not advice:
        lines.append("No change of token budget, rows, edits, rank, layers or number of processes was found that fits.")
    return lines
