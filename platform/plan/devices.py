"""What each role computes on: cores, or a card whose data sheet is in the table."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from malmen.config import SPLIT, Config
from malmen.errors import UsageError
from malmen.lm.cards import CARDS, Card, find_card
from malmen.lm.devices import resolve_dtype
from malmen.platform.plan.shapes import hidden_size

ASSUMED = "A100-80"  # the card where none is named and none is here


@dataclass(frozen=True)
class Device:
    """What one process of a role has."""

    kind: str  # cpu or cuda
    threads: int  # cores of a process on CPUs
    card: Card | None = None  # of a process on a GPU
    guess: str = ""  # why its numbers are a guess
    tf32: bool = False  # whether float32 products are made in TF32

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.card.name}{self.guess}" if self.card else f"{self.threads} cores"


@dataclass(frozen=True)
class Devices:
    """Of both roles, and whether that is on this machine."""

    lm: Device
    hypernet: Device
    here: bool


def find_devices(config: Config, lm_card: str | None = None, hypernet_card: str | None = None) -> Devices:
    """As config and names of cards say; what they leave open is as this machine has it."""
    cluster, cores = config.cluster, os.cpu_count() or 1
    kinds = _kinds(config)
    most_cpus = max(cluster.lm_cpus, cluster.hypernet_cpus)
    here = not (cluster.lm_resources or cluster.hypernet_resources) and most_cpus <= cores
    here = here and (torch.cuda.is_available() or "cuda" not in kinds)

    def device(kind: str, processes: int, cpus: float, name: str | None) -> Device:
        threads = max(1, cores // processes if here else int(cpus))  # as cluster.size_roles gives them
        return Device(kind, threads, *_card(name)) if kind == "cuda" else Device(kind, threads)

    actors = device(kinds[1], cluster.hypernet_actors, cluster.hypernet_cpus, hypernet_card or lm_card)
    return Devices(
        device(kinds[0], cluster.lm_workers, cluster.lm_cpus, lm_card),
        replace(actors, tf32=config.editor.tf32 and actors.card is not None and actors.card.tf32 > 0),
        here,
    )


def planned_dtype(config: Config, lm: Device) -> torch.dtype:
    """The LM's, as `model.dtype` says or as its device would have it."""
    if config.model.dtype == "auto" and lm.card is not None:
        return torch.bfloat16 if lm.card.bfloat16 else torch.float32
    return resolve_dtype(config.model.model_copy(update={"device": "cpu"}), hidden_size(config.model))


def _kinds(config: Config) -> tuple[str, str]:
    """cpu or cuda, of the LM workers and of the actors."""
    name, cluster = config.model.device, config.cluster
    if name == "cpu":
        return "cpu", "cpu"
    gpus = torch.cuda.is_available() if cluster.lm_gpus is None else cluster.lm_gpus > 0
    lm = "cuda" if name.startswith(("cuda", SPLIT)) or gpus else "cpu"
    actors = lm == "cuda" if cluster.hypernet_gpus is None else cluster.hypernet_gpus > 0
    return lm, "cuda" if actors else "cpu"


def _card(name: str | None) -> tuple[Card, str]:
    """The card of this name, else this machine's, else the assumed one; and what of it is a guess."""
    assumed = find_card(ASSUMED)
    assert assumed is not None
    if name is not None:
        if (card := find_card(name)) is None:
            raise UsageError(f"no card {name!r} in the table: expected one of {', '.join(card.name for card in CARDS)}")
        return card, ""
    if not torch.cuda.is_available():
        return assumed, " (assumed)"
    name = torch.cuda.get_device_name()
    if (card := find_card(name)) is not None:
        return card, ""
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return replace(assumed, name=name, memory=memory), f" (not in the table: rates of {ASSUMED})"
