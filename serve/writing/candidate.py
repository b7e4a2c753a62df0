"""A version that is computed and measured, but not yet recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from malmen.edit_set import EditSet, FactRows
from malmen.serve.ledger.chain import now
from malmen.serve.ledger.tables import Version
from malmen.serve.problems import Problem
from malmen.serve.writing.changes import Plan
from malmen.serve.writing.guards import Guards, Measured


@dataclass(frozen=True)
class Candidate:
    """The version that plans lead to."""

    plans: Mapping[int, Plan]  # by the request's index
    rows: FactRows | None  # of all new facts, in the order of the plans
    edit_set: EditSet
    shifts: dict[str, Tensor]  # layer -> (value, key)
    measured: Measured

    def reports(self) -> dict[int, list[dict[str, Any]]]:
        """By request: whether each of its new facts holds."""
        rest = iter(self.measured.predicted)
        return {index: [new.report(next(rest)) for new in plan.new] for index, plan in self.plans.items()}

    def version(self, name: str, number: int, parent: str, shifts: str | None) -> Version:
        """The version, as the ledger records it."""
        actors = ", ".join(dict.fromkeys(plan.change.actor for plan in self.plans.values()))
        size, report = self.edit_set.num_facts, self.measured.report()
        return Version(name, number, parent, shifts, size, report, actors[:200], now())

    def refusals(self, guards: Guards) -> dict[int, list[str]]:
        """By request, why it may not be published; empty where all may. Limits on adding do not block a removal."""
        adds = any(plan.new for plan in self.plans.values())
        common = guards.reasons(self.measured) if adds or not self.measured.finite else []
        required, reasons = guards.config.min_success, {}
        for index, reports in self.reports().items():
            held = sum(report["holds"] for report in reports)
            too_few = f"{held} of {len(reports)} new facts would hold; guard.min_success requires {required:.0%}"
            reasons[index] = [*common, *([too_few] if held < required * len(reports) else [])]
        return {index: why for index, why in reasons.items() if why}

    def refused(self, index: int, reasons: list[str]) -> Problem:
        """The answer to a request that may not be published."""
        facts = [
            {"index": new.index, "prompt": new.fact.prompt, **report}
            for new, report in zip(self.plans[index].new, self.reports()[index], strict=True)
        ]
        detail = "the version was not published: " + "; ".join(reasons)
        return Problem(422, detail, reasons=reasons, facts=facts, guard=self.measured.report())
