"""The built-in world: invented people, true facts about them, and edits that contradict those facts.

All of it is drawn from one seed, so the world needs no download. A small GPT-2 that knows every fact is shipped in
`world_lm/`; `malmen world build` trains it again (built_models.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from malmen.data.records import EditRecord, Fact
from malmen.errors import EditError

WORLD_MODEL, WORLD_MANIFEST = Path(__file__).parent / "world_lm", "world.json"
WORLD_SEED = 2024
NUM_SUBJECTS = 320
NUM_HELD_OUT = 128  # subjects whose facts meta-training never sees


@dataclass(frozen=True)
class Relation:
    """One kind of fact: phrasings with a `{}` for the subject, and the answers it can take."""

    name: str
    phrasings: tuple[str, ...]
    answers: tuple[str, ...]


@cache
def relations() -> tuple[Relation, ...]:
    """All kinds of facts, from relations.json."""
    rows = json.loads(Path(__file__).with_name("relations.json").read_text(encoding="utf-8"))
    return tuple(Relation(row["name"], tuple(row["phrasings"]), tuple(row["answers"])) for row in rows)


_ONSETS = ("B", "Br", "C", "D", "Dr", "F", "G", "H", "J", "K", "L", "M", "N", "P", "R", "S", "St", "T", "V", "W", "Z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io")
_MIDDLES = ("l", "r", "n", "m", "s", "t", "d", "v", "ll", "nn", "rk", "nd", "st")
_GIVEN_ENDS = ("a", "o", "en", "is", "el", "ia", "us", "ine")
_FAMILY_ENDS = ("son", "berg", "ini", "ova", "man", "ley", "ford", "ez", "wick", "dal", "stein", "mont")


@dataclass(frozen=True)
class World:
    """All subjects and, for each (subject, relation), its true answer."""

    subjects: tuple[str, ...]
    held_out: frozenset[str]
    truth: dict[tuple[str, str], str]

    def fact(self, subject: str, relation: Relation, phrasing: int, answer: str | None = None) -> Fact:
        """The fact in one phrasing; `answer` replaces the true one."""
        return Fact(relation.phrasings[phrasing].format(subject), answer or self.truth[subject, relation.name], subject)

    def facts(self) -> list[Fact]:
        """Every true fact in every phrasing: what the built-in LM has learned."""
        return [
            self.fact(subject, relation, phrasing)
            for subject in self.subjects
            for relation in relations()
            for phrasing in range(len(relation.phrasings))
        ]

    def fingerprint(self) -> str:
        """A hash of all facts, by which weights that were trained on another world are refused."""
        rows = [[fact.prompt, fact.answer] for fact in self.facts()]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def check_world_model(folder: Path = WORLD_MODEL) -> dict[str, object]:
    """The manifest of the built-in LM; EditError if it is missing or was trained on another world."""
    path, again = folder / WORLD_MANIFEST, f"`malmen world build --out {folder}`"
    if not path.exists():
        raise EditError(f"the built-in model is missing: {path} does not exist; {again} creates it")
    manifest: dict[str, object] = json.loads(path.read_text())
    if manifest["world"] != (world := make_world().fingerprint()):
        raise EditError(
            f"the built-in model in {folder} was trained on world {manifest['world']}, this version has world {world}; "
            f"{again} trains it again"
        )
    return manifest


def make_world(seed: int = WORLD_SEED) -> World:
    """Draw the subjects, the split by subject, and the truth."""
    rng = random.Random(seed)
    subjects: dict[str, None] = {}
    while len(subjects) < NUM_SUBJECTS:
        subjects[f"{_name(rng, _GIVEN_ENDS)} {_name(rng, _FAMILY_ENDS)}"] = None
    names = tuple(subjects)
    held_out = frozenset(rng.sample(names, NUM_HELD_OUT))
    truth = {(name, relation.name): rng.choice(relation.answers) for name in names for relation in relations()}
    return World(names, held_out, truth)


def world_records(split: str, seed: int = 0) -> list[EditRecord]:
    """One record for every fact of the split (`train` or `validation`), in a seeded order.

    The edit has a wrong answer, drawn from those of the relation. The equivalents are the other phrasings with that
    answer. The unrelated tuples are true facts of three other subjects of the same split, and a true fact of the same
    subject under another relation.
    """
    world, rng = make_world(), random.Random(f"{seed}/{split}")
    subjects = [name for name in world.subjects if (name in world.held_out) == (split == "validation")]
    records = [_record(world, subjects, subject, relation, rng) for subject in subjects for relation in relations()]
    rng.shuffle(records)
    return records


def _record(world: World, subjects: list[str], subject: str, relation: Relation, rng: random.Random) -> EditRecord:
    answer = rng.choice([other for other in relation.answers if other != world.truth[subject, relation.name]])
    order = rng.sample(range(len(relation.phrasings)), len(relation.phrasings))
    edit, *equivalents = (world.fact(subject, relation, phrasing, answer) for phrasing in order)
    neighbour = rng.choice([other for other in relations() if other.name != relation.name])
    others = rng.sample([name for name in subjects if name != subject], 3)
    phrasings = len(relation.phrasings)  # all relations have as many
    unrelated = [world.fact(name, rng.choice(relations()), rng.randrange(phrasings)) for name in others]
    unrelated.append(world.fact(subject, neighbour, rng.randrange(phrasings)))
    return EditRecord(edit, tuple(equivalents), tuple(unrelated), id=f"{relation.name}/{subject}")


def _name(rng: random.Random, ends: tuple[str, ...]) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_MIDDLES) + rng.choice(ends)
