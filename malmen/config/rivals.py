"""The settings of each rival, `baselines.NAME`: type, default, meaning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from malmen.config.section import Section


class MendConfig(Section):
    """MEND: the settings of `editor`, except for these."""

    edit_lr: float | None = Field(
        default=None, gt=0, description="initial η: a sum of many shifts may need a smaller one; default: the editor's"
    )


class RLEditConfig(Section):
    """RLEdit: the settings of `training`, except for these."""

    trajectory: int = Field(default=8, gt=1, description="batches into which a step's edits are cut")
    locality_coef: float = Field(default=0.6, ge=0, description="weight of KL(previous ‖ new edited model)")


class FineTuneConfig(Section):
    """Fine-tuning (FT), as in the paper's appendix."""

    layers: str | list[str] = Field(default="last:3", description="blocks whose FFN is tuned, as in editor.layers")
    ffn: Literal["first", "second", "both"] = Field(default="both", description="which linear of the FFN")
    lr: float = Field(default=5e-4, gt=0, description="AdamW's learning rate")
    weight_decay: float = Field(default=5e-4, ge=0, description="AdamW's weight decay")
    epochs: int = Field(default=5, gt=0, description="passes over the facts")
    batch_facts: int = Field(default=8, gt=0, description="facts per step of AdamW")


class MemitConfig(Section):
    """MEMIT."""

    layers: str | list[str] = Field(
        default="middle:3", description="as in editor.layers; values are set at the last one"
    )
    steps: int = Field(default=25, gt=0, description="Adam's steps for the value of each fact")
    lr: float = Field(default=0.5, gt=0, description="Adam's learning rate")
    weight_decay: float = Field(default=0.5, ge=0, description="weight of ‖δ‖/‖h‖²")
    kl_coef: float = Field(default=0.0625, ge=0, description="weight of the KL that keeps how `SUBJECT is a` continues")
    enough: float = Field(default=0.05, ge=0, description="loss below which a fact is left as it is")
    clamp: float = Field(default=0.75, gt=0, description="largest ‖δ‖, in units of ‖h‖")
    covariance_weight: float = Field(default=15_000, gt=0, description="weight of the second moment of keys")
    corpus: str | None = Field(
        default=None,
        description="text file (one text a line) that this moment is taken from; default: the training data",
    )
    corpus_tokens: int = Field(default=100_000, gt=0, description="tokens of it, at most")
    prefixes: int = Field(
        default=4,
        ge=0,
        description="number of random texts; a fact's value is also fitted, and its key averaged, with each of them "
        "before its prompt",
    )
    prefix_tokens: int = Field(default=8, gt=0, description="tokens of each random text")
    cache_dir: str = Field(default="runs/key_moments", description="folder that keeps the moments")


class MemitHistoryConfig(Section):
    """MEMIT with the history of its rounds: the settings of `memit`, except for these."""

    covariance_weight: float | None = Field(
        default=None, gt=0, description="weight of the second moment of keys; default: MEMIT's"
    )


class AlphaEditConfig(Section):
    """AlphaEdit: values, layers and the moments of keys by the settings of `memit`, and these."""

    threshold: float = Field(
        default=0.02,
        gt=0,
        description="eigenvalue of the keys' second moment (E[u uᵀ], the mean over tokens) below which a direction is "
        "free for shifts",
    )
    free_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="in place of the threshold: share of the key's directions that are free, by smallest eigenvalue",
    )
    damping: float = Field(default=1.0, gt=0, description="λ")


class UltraEditConfig(Section):
    """UltraEdit."""

    layers: str | list[str] = Field(default="last:6", description="as in editor.layers")
    ffn: Literal["first", "second"] = Field(default="second", description="which linear of the FFN")
    tokens: Literal["answer", "all"] = Field(default="answer", description="tokens whose keys and gradients are used")
    edit_lr: float = Field(default=1e-6, gt=0, description="η")
    damping: float = Field(default=1.0, gt=0, description="λ")


class LoRAConfig(Section):
    """LoRA fine-tuning."""

    layers: str | list[str] = Field(default="all", description="blocks whose FFN is tuned, as in editor.layers")
    ffn: Literal["first", "second", "both"] = Field(default="both", description="which linear of the FFN")
    rank: int = Field(default=8, gt=0, description="of each layer's change s B A, at most")
    alpha: float = Field(default=16.0, gt=0, description="s is alpha / rank")
    lr: float = Field(default=1e-3, gt=0, description="Adam's learning rate")
    epochs: int = Field(default=30, gt=0, description="passes over the facts, at most")
    stop_early: bool = Field(default=True, description="whether it ends after an epoch once every answer holds")
    batch_facts: int = Field(default=8, gt=0, description="facts per step of Adam")


class RetrievalConfig(Section):
    """Retrieval: the nearest fact is put before a prompt, and no weight changes."""

    threshold: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="least similarity to the nearest fact's prompt at which that fact is put before the prompt",
    )
    template: str = Field(
        default="{fact} {answer}\n{prompt}",
        description="what the model then reads: the nearest fact's prompt and answer, and at the end the given prompt",
    )


class BaselinesConfig(Section):
    """The methods that MALMEN is compared with."""

    mend: MendConfig = MendConfig()
    rledit: RLEditConfig = RLEditConfig()
    ft: FineTuneConfig = FineTuneConfig()
    memit: MemitConfig = MemitConfig()
    memit_history: MemitHistoryConfig = MemitHistoryConfig()
    alphaedit: AlphaEditConfig = AlphaEditConfig()
    ultraedit: UltraEditConfig = UltraEditConfig()
    lora: LoRAConfig = LoRAConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
