"""A plan as tables: memory of each role, normal equations, bytes moved, stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from rich.table import Table

from malmen.platform.cli.output import numbers_table, out
from malmen.platform.plan.advice import Advice
from malmen.platform.plan.memory import GB, MB
from malmen.platform.plan.planner import Plan

_MOVED = {
    "traces": "traces, to the actors",
    "shifts": "shifts, to every LM worker",
    "shift_grads": "shift gradients, to the actors",
    "shift_grad_sum": "sum of shift gradients over LM workers",
    "solve": "between actors that share a layer",
    "theta_grads": "sum of θ's gradient over actors",
    "weights": "weights gathered by ZeRO-3",
}


def show_plan(plan: Plan, advice: Sequence[Advice]) -> None:
    """All tables, the assumptions, and the verdict last."""
    config = plan.config
    title = (
        f"{config.model.name}: {plan.parameters / 1e9:.3g} B parameters in {plan.dtype}, {len(plan.layers)} edited "
        f"layers; a step has {config.training.num_edits} edits ({plan.edit_tokens} traced tokens a layer) and "
        f"{plan.facts} facts in all"
    )
    assumptions = [f"· {line}" for line in plan.assumptions]
    for part in (title, *_tables(plan), *assumptions, *_verdict(plan, advice)):
        out.print(part, soft_wrap=isinstance(part, str))


def size(count: float) -> str:
    """Bytes for a table."""
    return f"{count / GB:.2f} GB" if count >= GB else f"{count / MB:.1f} MB"


def seconds(value: float) -> str:
    """A duration for a table."""
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.3g} s"


def _tables(plan: Plan) -> Iterator[Table]:
    for role, device in ((plan.lm, plan.devices.lm), (plan.hypernet, plan.devices.hypernet)):
        name = f"{role.processes} × {role.name}" if role.processes > 1 else role.name
        for where, held in ((device.name if device.card else "CPU", role.items), ("its host", role.host)):
            if held:
                limit = role.host_limit if held is role.host else role.limit
                of = "an unknown size" if limit is None else size(limit)
                yield numbers_table(
                    f"{name} on {where}: {size(sum(held.values()))} of {of}",
                    ("held at the peak, by one process", ""),
                    [(item, size(count)) for item, count in held.items()],
                )
    if plan.equations:
        yield numbers_table(
            "normal equation of each layer, in float64",
            ("layer", "form", "matrix", "gram", "factor kept"),
            [
                (layer, form, f"{rows} × {rows}", size(gram), size(factor))
                for layer, form, rows, gram, factor in map(astuple, plan.equations)
            ],
        )
    transfers = {label: getattr(plan.transfers, name) for name, label in _MOVED.items()}
    yield numbers_table(
        f"moved in a step: {size(sum(transfers.values()))}",
        ("between processes", ""),
        [(label, size(count)) for label, count in transfers.items() if count],
    )
    steps = plan.config.training.steps
    yield numbers_table(
        f"a step: {seconds(plan.step_seconds)}; {steps} steps: {seconds(plan.step_seconds * steps)}",
        ("stage, one process", "GFLOP", "moved", "expected"),
        [
            (name, f"{flops / 1e9:,.1f}" if flops else "", size(moved) if moved else "", seconds(expected))
            for name, flops, moved, expected in map(astuple, plan.stages)
        ],
    )


def _verdict(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    if plan.fits:
        unknown = any(role.node_limit is None for role in (plan.lm, plan.hypernet))
        return ["It fits, as far as limits are known." if unknown else "It fits."]
    lines = [
        f"Each {role.name} needs {size(needed)}{where} and has {size(has)}: it does not fit."
        for role in (plan.lm, plan.hypernet)
        for needed, has, where in ((role.total, role.limit, ""), (role.in_node, role.node_limit, " of its host"))
        if has is not None and (not where or role.host) and needed > has
    ]
    if plan.machine and plan.machine[0] > plan.machine[1]:
        needed, has = map(size, plan.machine)
        lines.append(f"All processes on this machine need {needed} and it has {has}: they do not fit together.")
    for way in advice:
        needs = f"LM worker {size(way.lm)}, hypernet actor {size(way.hypernet)}"
        lines.append(f"It fits with {' '.join(way.settings)} ({needs}).")
    if not advice:
        lines.append("No change of token budget, rows, edits, rank, layers or number of processes was found that fits.")
    return lines
