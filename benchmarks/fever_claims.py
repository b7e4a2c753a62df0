"""From claims with labels to what a fact checker learns and to records that reverse its labels (§5 and the appendix).

A record's unrelated claims come from a part of the file that nothing edits, and no paraphrase crosses a border: not
that between training and validation, nor that between edited and unrelated claims.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malmen.data.readers import write_records
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import CLASSES

MIN_OVERLAP = (
    0.9  # word overlap from which we take a near-paraphrase for an equivalent; at 0.8 many mean something else
)
FRAMES = ("It is true that {}.", "It is a fact that {}.", "It is the case that {}.", "{}, it is said.")
Row = dict[str, Any]  # claim, label, id; near_paraphrase and jaccard where the file has them


@dataclass(frozen=True)
class Split:
    """Rows whose labels are reversed, and rows whose labels must stay."""

    edited: list[Row]
    unrelated: list[Row]

    @property
    def rows(self) -> list[Row]:
        return [*self.edited, *self.unrelated]


def flipped(label: str) -> str:
    """The other of the two labels."""
    return CLASSES[1 - CLASSES.index(label)]


def paraphrase_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in groups: claims that are near-paraphrases of each other, at any overlap, are in the same one."""
    parent: dict[str, str] = {}

    def root(claim: str) -> str:
        while (above := parent.setdefault(claim, claim)) != claim:
            claim = above
        return claim

    for row in rows:
        parent[root(row["claim"])] = root(row.get("near_paraphrase") or row["claim"])
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(root(row["claim"]), []).append(row)
    return list(groups.values())


def split_claims(rows: Sequence[Row], *, validation: int, unrelated: float, seed: int) -> tuple[Split, Split]:
    """(training, validation), the latter of about `validation` rows; of each, the share `unrelated` is not edited."""
    groups = paraphrase_groups(rows)
    random.Random(seed).shuffle(groups)
    held_out: list[list[Row]] = []
    while groups and sum(map(len, held_out)) < validation:
        held_out.append(groups.pop())
    return _parted(groups, unrelated), _parted(held_out, unrelated)


def _parted(groups: Sequence[list[Row]], unrelated: float) -> Split:
    border = round(len(groups) * unrelated)
    return Split(*([row for group in part for row in group] for part in (groups[border:], groups[:border])))


def paraphrase(row: Row, seed: int) -> str:
    """The row's near-paraphrase if it says the same in nearly the same words, else the claim in a frame."""
    near = row.get("near_paraphrase") or ""
    if near and row.get("jaccard", 0) >= MIN_OVERLAP and _negations(near) == _negations(row["claim"]):
        return str(near)
    frame = random.Random(f"{seed}/{row['claim']}").choice(FRAMES)
    return frame.format(row["claim"].rstrip(" ."))


def _negations(text: str) -> int:
    return len(re.findall(r"\b(?:not|never|no|only|n't)\b", text.lower()))


def reversals(split: Split, seed: int) -> list[EditRecord]:
    """A record for each edited row: its label reversed, one paraphrase of it, one of a claim of the unrelated rows."""
    others = split.unrelated
    if not others:
        raise ValueError("no unrelated claims: give a larger share, or more claims")
    order = random.Random(seed).sample(others, len(others))
    records = []
    for place, row in enumerate(split.edited):
        answer, other = flipped(row["label"]), order[place % len(order)]
        equivalent = Fact(paraphrase(row, seed), answer)
        # In the same words as an equivalent: else an editor learns to reverse whatever stands in a frame.
        unrelated = Fact(paraphrase(other, seed), other["label"])
        records.append(EditRecord(Fact(row["claim"], answer), (equivalent,), (unrelated,), str(row.get("id", ""))))
    return records


def read_claims(path: Path) -> list[Row]:
    """The first row of each claim, of a JSONL file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list({row["claim"]: row for row in reversed(rows)}.values())[::-1]


def write_files(folder: Path, train: Split, validation: Split, seed: int) -> dict[str, int]:
    """claims-*.jsonl to learn from, edits-*.jsonl to edit; the number of rows of each."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = {"train": train.rows, "held-out": validation.rows, "all": [*train.rows, *validation.rows]}
    for name, rows in claims.items():
        lines = (json.dumps({"claim": row["claim"], "label": row["label"]}, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"claims-{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    edits = {"train": reversals(train, seed), "validation": reversals(validation, seed)}
    for name, records in edits.items():
        write_records(folder / f"edits-{name}.jsonl", records)
    counts = {f"claims-{name}": len(rows) for name, rows in claims.items()}
    return counts | {f"edits-{name}": len(records) for name, records in edits.items()}
