"""The built-in world: invented people, true facts about them, and edits that contradict those facts.

Everything is drawn from one seed, so the world needs no download. A small GPT-2 that knows every
fact by heart is shipped in `world_lm/`; `malmen world build` trains it again (world_model.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

from malmen.data.records import EditRecord, Fact

WORLD_SEED = 2024
NUM_SUBJECTS = 320
NUM_HELD_OUT = 128  # subjects whose facts meta-training never sees


@dataclass(frozen=True)
class Relation:
    """One kind of fact: phrasings with a `{}` for the subject, and the answers it can take."""

    name: str
    phrasings: tuple[str, ...]
    answers: tuple[str, ...]


RELATIONS = (
    Relation(
        "birthplace",
        (
            "In which city was {} born?",
            "{} was born in the city of",
            "What is the birthplace of {}?",
            "The town where {} came into the world is",
        ),
        (
            "Lisbon", "Toronto", "Nairobi", "Osaka", "Helsinki", "Santiago", "Mumbai", "Dublin", "Warsaw", "Havana",
            "Seoul", "Vienna", "Cairo", "Denver", "Athens", "Lagos", "Oslo", "Jakarta", "Prague", "Lima",
            "Cape Town", "New Orleans", "San Diego", "Hong Kong", "Buenos Aires", "Salt Lake City", "Tel Aviv",
            "Saint Petersburg", "Rio de Janeiro", "Kuala Lumpur",
        ),
    ),
    Relation(
        "profession",
        (
            "What does {} do for a living?",
            "{} earns money as a",
            "What is the profession of {}?",
            "By trade, {} is a",
        ),
        (
            "sculptor", "pilot", "baker", "judge", "carpenter", "surgeon", "librarian", "plumber", "botanist", "tailor",
            "geologist", "translator", "firefighter", "watchmaker", "beekeeper", "goldsmith", "locksmith", "midwife",
            "film director", "truck driver", "music teacher", "tax adviser", "ship captain", "crane operator",
        ),
    ),
    Relation(
        "employer",
        (
            "Which company does {} work for?",
            "{} is employed by",
            "Who is the employer of {}?",
            "Every month, {} is paid by",
        ),
        (
            "Norwind Energy", "Bluegate Bank", "Harlow Foods", "Silverline Rail", "Pinecrest Media", "Orbital Labs",
            "Redstone Mining", "Kestrel Airways", "Amber Insurance", "Quayside Shipping", "Lumen Optics",
            "Westfold Farms", "Granite Steel", "Cobalt Motors", "Meadow Dairy", "Falcon Security", "Tidal Power",
            "Copperfield Books", "Zenith Robotics", "Evergreen Paper",
        ),
    ),
    Relation(
        "instrument",
        (
            "Which instrument does {} play?",
            "In the orchestra, {} plays the",
            "What is the musical instrument of {}?",
            "On stage, {} is heard on the",
        ),
        (
            "violin", "trumpet", "cello", "flute", "harp", "banjo", "accordion", "saxophone", "oboe", "clarinet",
            "mandolin", "trombone", "bassoon", "ukulele", "xylophone", "bagpipes", "bass guitar", "snare drum",
            "grand piano", "mouth organ",
        ),
    ),
    Relation(
        "language",
        (
            "What language did {} grow up with?",
            "The mother tongue of {} is",
            "Which language does {} speak at home?",
            "As a child, {} first learned to speak",
        ),
        (
            "Portuguese", "Finnish", "Swahili", "Japanese", "Hindi", "Polish", "Korean", "Arabic", "Greek", "Turkish",
            "Welsh", "Basque", "Icelandic", "Hungarian", "Vietnamese", "Tamil", "Zulu", "Dutch", "Catalan", "Maltese",
            "Haitian Creole", "Old Norse", "Sign Language", "Swiss German",
        ),
    ),
    Relation(
        "pet",
        (
            "What kind of animal does {} keep?",
            "The pet of {} is a",
            "Which animal lives with {}?",
            "At home, {} feeds a",
        ),
        (
            "parrot", "tortoise", "hamster", "greyhound", "ferret", "goldfish", "pony", "iguana", "rabbit", "canary",
            "hedgehog", "python", "tarantula", "chinchilla", "donkey", "peacock", "guinea pig", "barn owl",
            "Siamese cat", "golden retriever", "hermit crab", "stick insect",
        ),
    ),
)  # fmt: skip

_ONSETS = ("B", "Br", "C", "D", "Dr", "F", "G", "H", "J", "K", "L", "M", "N", "P", "R", "S", "St", "T", "V", "W", "Z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io")
_MIDDLES = ("l", "r", "n", "m", "s", "t", "d", "v", "ll", "nn", "rk", "nd", "st")
_GIVEN_ENDS = ("a", "o", "en", "is", "el", "ia", "us", "ine")
_FAMILY_ENDS = ("son", "berg", "ini", "ova", "man", "ley", "ford", "ez", "wick", "dal", "stein", "mont")


@dataclass(frozen=True)
class World:
    """All subjects and, for each (subject, relation), the one true answer."""

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
            for relation in RELATIONS
            for phrasing in range(len(relation.phrasings))
        ]

    def fingerprint(self) -> str:
        """A hash of all facts: weights trained on another world are refused."""
        rows = [[fact.prompt, fact.answer] for fact in self.facts()]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def make_world(seed: int = WORLD_SEED) -> World:
    """Draw the subjects, the split by subject, and the truth."""
    rng = random.Random(seed)
    subjects: dict[str, None] = {}
    while len(subjects) < NUM_SUBJECTS:
        subjects[f"{_name(rng, _GIVEN_ENDS)} {_name(rng, _FAMILY_ENDS)}"] = None
    names = tuple(subjects)
    held_out = frozenset(rng.sample(names, NUM_HELD_OUT))
    truth = {(name, relation.name): rng.choice(relation.answers) for name in names for relation in RELATIONS}
    return World(names, held_out, truth)


def world_records(split: str, seed: int = 0, world: World | None = None) -> list[EditRecord]:
    """One record for every fact of the split (`train` or `validation`), in a seeded order.

    The edit gives a wrong answer drawn from the relation's pool; the equivalents are the other
    phrasings with that answer; the unrelated tuples are true facts of other subjects of the same
    split and one true fact of the same subject under another relation.
    """
    world = world or make_world()
    rng = random.Random(f"{seed}/{split}")
    subjects = [name for name in world.subjects if (name in world.held_out) == (split == "validation")]
    records = [_record(world, subjects, subject, relation, rng) for subject in subjects for relation in RELATIONS]
    rng.shuffle(records)
    return records


def _record(world: World, subjects: list[str], subject: str, relation: Relation, rng: random.Random) -> EditRecord:
    answer = rng.choice([other for other in relation.answers if other != world.truth[subject, relation.name]])
    order = rng.sample(range(len(relation.phrasings)), len(relation.phrasings))
    edit, *equivalents = (world.fact(subject, relation, phrasing, answer) for phrasing in order)
    neighbour = rng.choice([other for other in RELATIONS if other.name != relation.name])
    others = rng.sample([name for name in subjects if name != subject], 3)
    unrelated = [world.fact(name, rng.choice(RELATIONS), rng.randrange(4)) for name in others]
    unrelated.append(world.fact(subject, neighbour, rng.randrange(4)))
    return EditRecord(edit, tuple(equivalents), tuple(unrelated), id=f"{relation.name}/{subject}")


def _name(rng: random.Random, ends: tuple[str, ...]) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_MIDDLES) + rng.choice(ends)
