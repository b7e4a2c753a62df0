"""All editing methods, one entry each: what commands, experiments, tables and pictures know about a method.

Importing this module loads no torch. A method's own module is imported when the method is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.edit_method import UntrainedMethod
    from malmen.lm.model import LanguageModel

# How later rounds of editing join earlier ones: `union` solves for the facts of all rounds, `again` edits the edited
# model.
Rounds = Literal["union", "again"]


@dataclass(frozen=True)
class Method:
    """An editing method. One with `make` needs no meta-training; any other is an editor that a run trains."""

    name: str  # of the option --method, of its settings `baselines.NAME`, and in files of results
    label: str  # in tables and pictures
    colour: str  # of its lines in pictures, a matplotlib colour
    marker: str  # of its points in pictures, a matplotlib marker
    rounds: tuple[Rounds, ...] = ()  # what the experiment `rounds` compares; () leaves the method out
    paths: tuple[str, ...] = ()  # those of its settings that name files or folders
    shares: str | None = None  # the rival whose settings it has beside its own
    weights: bool = True  # whether it changes weights; where not, there is nothing to save, export or serve
    make: Callable[[LanguageModel, Config], UntrainedMethod] | None = None
    training_settings: Callable[[Config], dict[str, Any]] = lambda _config: {}  # of its run, by section.key

    @property
    def trained(self) -> bool:
        """Whether it needs a meta-trained editor."""
        return self.make is None

    def training_config(self, config: Config) -> Config:
        """The config that trains it in MALMEN's place."""
        changes = self.training_settings(config)
        if not changes:
            return config
        from malmen.config import parse_config, set_key

        raw = config.model_dump(mode="json")
        for key, value in changes.items():
            set_key(raw, key, value)
        return parse_config(raw, self.label)

    def settings(self, config: Config) -> dict[str, Any]:
        """All that it is set by, as plain values; MALMEN's are those of the run."""
        section = getattr(config.baselines, self.name, None)
        if section is None:
            return {}
        if self.shares is None:
            return dict(section.model_dump(mode="json"))
        return METHODS[self.shares].settings(config) | section.model_dump(mode="json", exclude_none=True)


def _lazy(place: str) -> Callable[..., Any]:
    """What stands at `module:name` in this folder; its module is imported when it is called."""
    return lambda *arguments: resolve_name(f"malmen.methods.{place}")(*arguments)


METHODS = {
    method.name: method
    for method in (
        Method("malmen", "MALMEN", "C0", "o", rounds=("union", "again")),
        Method("mend", "MEND", "C1", "s", training_settings=_lazy("mend:mend_settings")),
        Method("rledit", "RLEdit", "C5", "p", rounds=("again",), training_settings=_lazy("rledit:rledit_settings")),
        Method("ft", "FT", "C2", "^", rounds=("again",), make=_lazy("fine_tune:FineTune")),
        Method(
            "memit", "MEMIT", "C3", "D", rounds=("again",), paths=("cache_dir", "corpus"), make=_lazy("memit:Memit")
        ),
        Method(
            "memit_history",
            "MEMIT with history",
            "C6",
            "P",
            rounds=("again",),
            shares="memit",
            make=_lazy("memit:MemitHistory"),
        ),
        Method(
            "alphaedit", "AlphaEdit", "C8", "X", rounds=("again",), shares="memit", make=_lazy("alphaedit:AlphaEdit")
        ),
        Method("ultraedit", "UltraEdit", "C4", "v", rounds=("again",), make=_lazy("ultraedit:UltraEdit")),
        Method("lora", "LoRA", "C7", "h", rounds=("again",), make=_lazy("lora:LoRA")),
        Method("retrieval", "Retrieval", "C9", "*", weights=False, make=_lazy("retrieval:Retrieval")),
    )
}
