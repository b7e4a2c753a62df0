"""A version that is computed and measured, and not yet recorded; and what callers are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from malmen.edit_set import EditSet, FactRows
from malmen.serve.changes import Plan, fact_report
from malmen.serve.guards import Guards, Measured
from malmen.serve.http.problems import Problem


@dataclass
class Candidate:
    """What a batch of plans comes to."""

    plans: Sequence[Plan]
    edit_set: EditSet
    rows: FactRows | None  # of the new facts, in the order of the plans
    shifts: dict[str, Tensor]
    measured: Measured

    def predicted(self) -> list[list[list[int]]]:
        """By request: the most probable answer tokens of its new facts."""
        rest = iter(self.measured.predicted)
        return [[next(rest) for _ in plan.new] for plan in self.plans]

    def reply(self, index: int, parent: str | None, made: tuple[str, int, list[str]] | None) -> dict[str, Any]:
        """What a caller reads; `made` is (version, number, ids of the new edits), or None for a dry run."""
        plan, predicted = self.plans[index], self.predicted()[index]
        rows: dict[int, dict[str, Any]] = {
            at: {"index": at, "id": edit.id, "status": "unchanged", "supersedes": None, **edit.report}
            for at, edit in plan.unchanged.items()
        }
        for place, (new, found) in enumerate(zip(plan.new, predicted, strict=True)):
            rows[new.index] = {
                "index": new.index,
                "id": made[2][place] if made else None,
                "status": "added",
                "supersedes": new.supersedes,
                **fact_report(new, found),
            }
        return {
            "version": made[0] if made else None,
            "number": made[1] if made else None,
            "parent": parent,
            "dry_run": made is None,
            "edits": [rows[at] for at in sorted(rows)],
            "removed": [name for name, how in plan.ended.items() if how == "removed"],
            "num_facts": self.edit_set.num_facts,
            "guard": self.measured.report(),
        }

    def refusals(self, guards: Guards) -> list[list[str]]:
        """Why each request may not be done, none of which is empty if the version as a whole may not be."""
        adds = any(plan.new for plan in self.plans)  # what only takes back is not held up by limits on adding
        common = guards.reasons(self.measured) if adds or not self.measured.finite else []
        found = []
        for plan, predicted in zip(self.plans, self.predicted(), strict=True):
            held = [row == new.encoded.targets for new, row in zip(plan.new, predicted, strict=True)]
            wanted = guards.config.min_success
            failed = bool(held) and sum(held) < wanted * len(held)
            few = f"{sum(held)} of {len(held)} new facts would hold; guard.min_success asks for {wanted:.0%}"
            found.append([*common, *([few] if failed else [])])
        return found

    def refused(self, reasons: list[str]) -> Problem:
        """The answer to the one request of a candidate that may not be published."""
        plan, predicted = self.plans[0], self.predicted()[0]
        facts = [
            {"index": new.index, "prompt": new.fact.prompt, **fact_report(new, found)}
            for new, found in zip(plan.new, predicted, strict=True)
        ]
        return Problem(
            422,
            "the version was not published: " + "; ".join(reasons),
            reasons=reasons,
            facts=facts,
            guard=self.measured.report(),
        )
