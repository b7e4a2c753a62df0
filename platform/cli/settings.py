"""Before a run: `malmen configs` and `malmen settings` list what can be chosen, `malmen plan` what it will need."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from malmen.errors import UsageError
from malmen.platform.cli.options import CONFIGS, AsJson, ConfigName, Overrides, resolve_config
from malmen.platform.cli.output import err, out, print_json, show_settings
from malmen.platform.cli.progress import slow_import, status


def configs() -> None:
    """List the shipped configs."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        out.print(f"{path.stem:14} {title}")


def settings(context: typer.Context, as_json: AsJson = False) -> None:
    """List every setting of a run with its default, and the commands that list those of sweeps and endpoints."""
    from malmen.config import describe_settings

    show_settings(describe_settings(), as_json)
    groups = getattr(context.find_root().command, "commands", {})
    for name, group in groups.items():  # other rooms define groups that have settings of their own
        if own := getattr(group, "commands", {}).get("settings"):
            err.print(f"`malmen {name} settings`: {own.help}", soft_wrap=True)


def plan(
    config: ConfigName,
    overrides: Overrides = None,
    flops: Annotated[
        float | None, typer.Option(min=0.001, help="GFLOP/s of a large product in the LM's type, on one process")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure that rate here instead")] = False,
    lm_memory: Annotated[float | None, typer.Option(min=0, help="GB that each LM worker has")] = None,
    hypernet_memory: Annotated[float | None, typer.Option(min=0, help="GB that each hypernet actor has")] = None,
    lm_host_memory: Annotated[float | None, typer.Option(min=0, help="GB of its host, beside its GPU")] = None,
    hypernet_host_memory: Annotated[float | None, typer.Option(min=0, help="the same of an actor")] = None,
    lm_card: Annotated[
        str | None, typer.Option(help="its GPU: A10G, A100-80, … (malmen/lm/cards.py); default: this machine's")
    ] = None,
    hypernet_card: Annotated[str | None, typer.Option(help="the same of an actor; default: --lm-card")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="GB/s between processes; default 1.25")] = None,
    gather_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s among LM workers; default 1.25, on GPUs 100")
    ] = None,
    fact_tokens: Annotated[int | None, typer.Option(min=2, help="tokens of a fact; default: from the data")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="of these, the answer's")] = None,
    as_json: AsJson = False,
) -> None:
    """What a run will need, before anything runs: memory, transfers, time; exit code 1 if it does not fit."""
    if flops is not None and measure:
        raise UsageError("--flops and --measure exclude each other")
    slow_import("malmen.platform.plan.planner")
    from malmen.config import load_config
    from malmen.platform.plan.advice import advise
    from malmen.platform.plan.output import show_plan
    from malmen.platform.plan.planner import Planner, PlanOptions

    planner = Planner(
        PlanOptions(
            lm_memory=lm_memory,
            hypernet_memory=hypernet_memory,
            gflops=flops,
            measure=measure,
            bandwidth=bandwidth,
            gather_bandwidth=gather_bandwidth,
            fact_tokens=fact_tokens,
            answer_tokens=answer_tokens,
            lm_card=lm_card,
            hypernet_card=hypernet_card,
            lm_host_memory=lm_host_memory,
            hypernet_host_memory=hypernet_host_memory,
        )
    )
    with status("rehearsing a step"):
        needs = planner.plan(load_config(resolve_config(config), overrides or []))
    with status("looking for settings that fit"):
        advice = advise(planner, needs)
    if as_json:
        print_json({**needs.as_dict(), "advice": [asdict(way) for way in advice]})
    else:
        show_plan(needs, advice)
    if not needs.fits:
        raise typer.Exit(1)
