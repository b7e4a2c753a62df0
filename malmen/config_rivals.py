"""The settings of the methods that MALMEN is compared with (section `baselines`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from malmen.config_section import Section


class MendConfig(Section):
    """MEND: the editor's own settings, but for these."""

    edit_lr: float | None = Field(
        default=None, gt=0, description="initial η: a sum of many shifts may need a smaller one; default: the editor's"
    )


class FineTuneConfig(Section):
    """FT, as the paper's appendix has it."""

    layers: str | list[str] = Field(default="last:3", description="blocks whose FFN is tuned, as editor.layers")
    ffn: Literal["first", "second", "both"] = Field(default="both", description="which linear of the FFN")
    lr: float = Field(default=5e-4, gt=0, description="AdamW's")
    weight_decay: float = Field(default=5e-4, ge=0, description="AdamW's")
    epochs: int = Field(default=5, gt=0, description="over the facts")
    batch_facts: int = Field(default=8, gt=0, description="facts per step of AdamW")


class MemitConfig(Section):
    """MEMIT."""

    layers: str | list[str] = Field(default="middle:3", description="as editor.layers; values are set at the last one")
    steps: int = Field(default=25, gt=0, description="of Adam, on the value of each fact")
    lr: float = Field(default=0.5, gt=0, description="Adam's")
    weight_decay: float = Field(default=0.5, ge=0, description="on ‖δ‖/‖h‖²")
    kl_coef: float = Field(default=0.0625, ge=0, description="keeps what `SUBJECT is a` continues with")
    enough: float = Field(default=0.05, ge=0, description="a fact whose loss is below this is left as it is")
    clamp: float = Field(default=0.75, gt=0, description="‖δ‖ is at most so many ‖h‖")
    covariance_weight: float = Field(default=15_000, gt=0, description="of the second moment of keys")
    corpus: str | None = Field(
        default=None, description="a text file, one text a line, to take that moment from; default: the training data"
    )
    corpus_tokens: int = Field(default=100_000, gt=0, description="of it, at most")
    prefixes: int = Field(default=4, ge=0, description="random texts before the prompt, besides none")
    prefix_tokens: int = Field(default=8, gt=0, description="tokens of each")
    cache_dir: str = Field(default="runs/key_moments", description="where the moments are kept, by content")


class UltraEditConfig(Section):
    """UltraEdit."""

    layers: str | list[str] = Field(default="last:6", description="as editor.layers")
    ffn: Literal["first", "second"] = Field(default="second", description="which linear of the FFN")
    tokens: Literal["answer", "all"] = Field(default="answer", description="whose keys and gradients are used")
    edit_lr: float = Field(default=1e-6, gt=0, description="η")
    damping: float = Field(default=1.0, gt=0, description="λ")


class BaselinesConfig(Section):
    """The rivals."""

    mend: MendConfig = MendConfig()
    ft: FineTuneConfig = FineTuneConfig()
    memit: MemitConfig = MemitConfig()
    ultraedit: UltraEditConfig = UltraEditConfig()
