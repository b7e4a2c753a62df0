"""What is asked of the set of facts, and what it comes to, given the facts that hold now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, FactEncoder
from malmen.errors import EditError
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.view import Edit
from malmen.serve.messages import Change


@dataclass
class LiveFacts:
    """The corrections that hold now, by id and by prompt."""

    by_id: dict[str, Edit] = field(default_factory=dict)
    by_prompt: dict[str, Edit] = field(default_factory=dict)

    def add(self, edits: Iterable[Edit]) -> None:
        """These hold now."""
        for edit in edits:
            self.by_id[edit.id] = edit
            self.by_prompt[edit.prompt] = edit

    def discard(self, names: Iterable[str]) -> None:
        """These do not any more."""
        for name in names:
            edit = self.by_id.pop(name)
            if self.by_prompt.get(edit.prompt) is edit:
                del self.by_prompt[edit.prompt]


@dataclass(frozen=True)
class NewFact:
    """A fact that will be added."""

    index: int  # in its request
    fact: Fact
    encoded: EncodedFact
    supersedes: str | None  # the correction of the same prompt that it replaces


@dataclass(frozen=True)
class Plan:
    """A change, made definite."""

    change: Change
    new: tuple[NewFact, ...]
    unchanged: Mapping[int, Edit]  # facts that hold already, by index
    ended: Mapping[str, str]  # correction -> removed or superseded

    def touches(self) -> set[str]:
        """What no other change of the same batch may touch: its facts' prompts, the corrections it ends, its key."""
        key = {f"key {self.change.actor} {self.change.key}"} if self.change.key else set()
        prompts = {f"prompt {fact.prompt}" for fact in self.change.facts}
        held = [*self.ended, *(edit.id for edit in self.unchanged.values())]
        return {*key, *prompts, *(f"edit {name}" for name in held)}


def make_plan(change: Change, live: LiveFacts, version: str, encoder: FactEncoder) -> Plan:
    """What a change comes to; a Problem with all that is wrong with it, fact by fact."""
    if change.base_version is not None and change.base_version != version:
        raise Problem(
            409, f"base_version is {change.base_version}, but {version} is live now; look at it and ask again",
            live=version,
        )  # fmt: skip
    if not change.facts and not change.remove:
        raise Problem(422, "nothing is asked: give facts, or corrections to remove")
    for name in change.remove:
        if name not in live.by_id:
            raise Problem(409, f"the edit {name!r} does not hold now, so it cannot be removed", edit=name)
    ended = dict.fromkeys(change.remove, "removed")
    new, unchanged, wrong = [], {}, []
    answers: dict[str, str] = {}
    for index, fact in enumerate(change.facts):
        held = live.by_prompt.get(fact.prompt)
        try:
            if fact.prompt in answers:
                same = answers[fact.prompt] == fact.answer
                raise EditError("it stands here twice" if same else f"it is also to be {answers[fact.prompt]!r}")
            answers[fact.prompt] = fact.answer
            encoded = encoder.encode(fact)
        except EditError as error:
            wrong.append({"index": index, "prompt": fact.prompt, "detail": str(error)})
            continue
        if held and held.answer == fact.answer and held.id not in ended:
            unchanged[index] = held
            continue
        if held:
            ended.setdefault(held.id, "superseded")
        new.append(NewFact(index, fact, encoded, held.id if held else None))
    if wrong:
        raise Problem(422, f"{len(wrong)} of {len(change.facts)} facts cannot be taken", facts=wrong)
    return Plan(change, tuple(new), unchanged, ended)


def fact_report(new: NewFact, predicted: list[int]) -> dict[str, Any]:
    """What became of a fact: whether its whole answer is now the most probable one, token by token."""
    targets = new.encoded.targets
    right = sum(one == other for one, other in zip(predicted, targets, strict=False))
    return {"holds": predicted == targets, "tokens_right": right, "tokens": len(targets)}
