"""Every setting of a run, once: type, default, meaning. Unknown keys are errors; defaults are the paper's (A.6)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from malmen.config.rivals import BaselinesConfig
from malmen.config.section import Section

SPLIT = "split"  # a value of model.device
Parametrisation = Literal["paper", "relative"]
PreservedTerm = Literal["unrelated", "phrasing"]


class ModelConfig(Section):
    """The language model to edit."""

    name: str = Field(default="builtin", description="`builtin`, a folder, a .gguf file, or a hub name")
    revision: str | None = Field(default=None, description="a hub revision")
    kind: Literal["auto", "decoder", "encoder-decoder", "classifier"] = Field(
        default="auto", description="`auto`: as the model's own config says"
    )
    device: str = Field(
        default="auto",
        description="`auto`, `cpu`, `cuda`, `cuda:1`, … (on Ray, the GPU that Ray assigns); "
        "`split`: block by block over all GPUs that a process sees",
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = Field(
        default="auto",
        description="`auto`: bfloat16 on a GPU that has it, and on a CPU that is 1.5 times as fast in it, else float32",
    )
    float32_products: Literal["auto", "blas", "onednn"] = Field(
        default="auto",
        description="what multiplies float32 matrices on a CPU: torch's BLAS, or oneDNN; `auto`: oneDNN where it is "
        "1.5 times as fast, as on AMD CPUs. Results differ by rounding",
    )


class EditorConfig(Section):
    """The hyper-network, and how the value differences that it asks for are merged into one shift."""

    layers: str | list[str] = Field(
        default="last:6", description="`last:K`, `first:K`, … (docs/models.md), or module names"
    )
    ffn: Literal["first", "second"] = Field(default="second", description="the linear of the FFN that a rule selects")
    attention: bool = Field(
        default=False, description="whether a rule also selects the last linear of the attention of each block"
    )
    tokens: Literal["answer", "all"] = Field(default="answer", description="tokens whose keys and gradients are used")
    aggregation: Literal["least_squares", "sum"] = Field(
        default="least_squares", description="how shifts are merged; `sum`: MEND"
    )
    products: Literal["auto", "float64", "sliced"] = Field(
        default="auto",
        description="the normal equation's sums over tokens: in `float64`, or `sliced` into exact products in float32; "
        "`auto`: sliced on a GPU whose float64 is slower than 1/16 of its float32",
    )
    tf32: bool = Field(
        default=False,
        description="whether hypernet actors on GPUs multiply float32 in TF32: faster, with 11 of 24 bits",
    )
    regularisation: bool = Field(default=True, description="whether the normal equation is damped by λ")
    rank: int = Field(default=1920, gt=0, description="rank of the hyper-network's linear maps")
    blocks: int = Field(default=2, ge=0, description="number of the hyper-network's residual blocks")
    edit_lr: float = Field(default=1e-6, gt=0, description="initial η, learned per layer")
    damping: float = Field(default=1.0, gt=0, description="initial λ_ℓ, learned per layer")
    parametrisation: Parametrisation = Field(
        default="paper",
        description="`paper`: η itself is learned and low-rank maps start from N(0, 1), as the paper's learning rates "
        "need; `relative`: log η, and Xavier's start, which need larger rates",
    )
    preserved_weight: float = Field(
        default=0.0,
        ge=0,
        description="w of the term w·E‖Su‖² over keys u of unrelated training facts, added to the least squares (not "
        "to a sum); 0: as in the paper",
    )
    preserved_null_space: float | None = Field(
        default=None,
        gt=0,
        description="confines shifts to the eigenvectors of E[uuᵀ] of these keys whose eigenvalues are below so many "
        "times the mean eigenvalue, e.g. 0.01; null: shifts may be anything",
    )
    phrasing_weight: float = Field(
        default=0.0,
        ge=0,
        description="v of the term v·E‖S(u − u′)‖² over keys u of training edits and u′ of their equivalents, at the "
        "tokens that predict the answer: what tells two phrasings apart is not edited; 0: as in the paper",
    )
    preserved_facts: int = Field(
        default=2048, gt=0, description="number of unrelated facts, and of pairs of phrasings, at most"
    )
    learn_preserved_weight: bool = Field(
        default=False,
        description="whether w and v are learned per layer, as their logarithms; they start at `preserved_weight` and "
        "`phrasing_weight`, and what is 0 stays 0",
    )
    token_weights: Literal["equal", "learned"] = Field(
        default="equal",
        description="`learned`: the hyper-network says how much each token's value difference counts in the least "
        "squares",
    )

    @model_validator(mode="after")
    def _has_a_weight_to_learn(self) -> EditorConfig:
        if self.learn_preserved_weight and self.preserved_weight == 0 and self.phrasing_weight == 0:
            raise ValueError("learn_preserved_weight needs a preserved_weight above 0 (or a phrasing_weight), e.g. 1")
        return self

    @property
    def preserved_terms(self) -> tuple[PreservedTerm, ...]:
        """What is added to the least squares. A sum of shifts solves no equation that a term could be added to."""
        wanted: dict[PreservedTerm, bool] = {
            "unrelated": self.preserved_weight > 0 or self.preserved_null_space is not None,
            "phrasing": self.phrasing_weight > 0,
        }
        return tuple(term for term in wanted if wanted[term] and self.aggregation == "least_squares")

    @property
    def preserving(self) -> bool:
        """Whether any term is added."""
        return bool(self.preserved_terms)

    @property
    def preserving_words(self) -> str:
        """The setting that adds terms, for messages."""
        if self.preserved_weight > 0:
            return f"editor.preserved_weight is {self.preserved_weight:g}"
        if self.preserved_null_space is not None:
            return f"editor.preserved_null_space is {self.preserved_null_space}"
        return f"editor.phrasing_weight is {self.phrasing_weight:g}"

    @property
    def weighing(self) -> bool:
        """Whether tokens have weights. A sum of shifts has no equation to weigh them in."""
        return self.token_weights == "learned" and self.aggregation == "least_squares"


class TrainingConfig(Section):
    """Meta-training."""

    num_edits: int = Field(default=64, gt=0, description="m, edits per step")
    min_edits: int | None = Field(
        default=None, gt=0, description="m is drawn for each step between this and num_edits; default: always num_edits"
    )
    steps: int = Field(default=1000, gt=0, description="meta-training steps")
    meta_lr: float = Field(default=1e-5, gt=0, description="Adam's learning rate for the hyper-network")
    scalar_lr: float | None = Field(
        default=None, gt=0, description="the same for η, λ, w and the scalars of token weights; default: meta_lr"
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="how both learning rates change over the steps"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps over which both learning rates rise from 0")
    locality_coef: float = Field(default=1.0, ge=0, description="λ_loc of eq. 1")
    locality_target: float | None = Field(
        default=None,
        gt=0,
        description="KL per token of unrelated texts that is tolerated; λ_loc then starts at locality_coef, and rises "
        "and falls with the losses of the steps until it is met",
    )
    locality_tokens: Literal["answer", "all"] = Field(
        default="answer", description="tokens of unrelated texts that L_loc compares; `all` is for decoders"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="norm to which the meta-gradient is clipped")
    equivalents_per_edit: int = Field(default=1, gt=0, description="equivalents sampled per edit and step")
    unrelated_per_edit: int = Field(default=1, ge=0, description="unrelated facts sampled per edit and step")
    include_edit: bool = Field(default=False, description="whether the edit itself is one of its equivalents")
    equivalents_per_step: int | None = Field(
        default=None,
        gt=0,
        description="equivalents of a step, at most, drawn from those of its edits: L_gen is a mean, so large steps "
        "need not ask for every edit; default: all",
    )
    unrelated_per_step: int | None = Field(
        default=None, gt=0, description="the same for unrelated facts and texts; default: all"
    )
    trajectory: int = Field(
        default=1,
        gt=0,
        description="batches into which a step's edits are cut, each of the model as those before left it; 1: all "
        "edits at once; more: RLEdit's, in one process (`malmen train --local`)",
    )
    trajectory_window: int = Field(
        default=10, gt=0, description="newest batches of a trajectory that the loss after each of them asks for"
    )
    trajectory_discount: float = Field(
        default=0.95, gt=0, le=1, description="factor of a batch's part in that loss, for each batch after it"
    )
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only at the end")
    eval_edits: int | None = Field(default=None, gt=0, description="edits per evaluation; default: num_edits")
    checkpoint_every: int = Field(default=100, gt=0, description="steps between checkpoints")
    keep_checkpoints: int = Field(
        default=2, gt=0, description="number of newest checkpoints to keep, besides the best by evaluation"
    )

    @model_validator(mode="after")
    def _has_one_locality_coef(self) -> TrainingConfig:
        if self.trajectory > 1 and self.locality_target is not None:
            raise ValueError("a trajectory has no locality_target: set it to null, and locality_coef to its weight")
        return self


class DataConfig(Section):
    """Edit records and how they become tokens."""

    train: str = Field(default="builtin", description="training records: `builtin` or a file")
    validation: str = Field(default="builtin", description="held-out records: `builtin` or a file")
    format: Literal["auto", "malmen", "zsre", "counterfact", "fever"] = Field(
        default="auto", description="format of both files, see docs/data.md"
    )
    unrelated: Literal["given", "self", "mixed"] = Field(
        default="given",
        description="what must not change: the unrelated facts of the records, texts that the model itself writes "
        "(`own_text`), or as many of both",
    )
    near_misses: int = Field(
        default=0,
        ge=0,
        description="questions per edit that must not change either: other training records', worded like the edit but "
        "about another subject, with what the model itself answers; `own_text.texts` of them at most are answered once",
    )
    prompt_format: Literal["raw", "chat"] = Field(default="raw", description="`chat`: in the tokenizer's chat template")
    max_length: int = Field(default=512, gt=1, description="tokens of a fact, at most")
    overlong: Literal["error", "truncate"] = Field(default="error", description="what happens to longer facts")
    append_eos: Literal["auto"] | bool | None = Field(
        default="auto",
        description="whether answers end with EOS; `auto`: of encoder-decoders, and of decoders after a question (a "
        "prompt that ends with a question mark, or a chat template); null: only of encoder-decoders",
    )


class OwnTextConfig(Section):
    """Texts that the unedited model writes, which edits are to leave as they are (`data.unrelated`)."""

    texts: int = Field(
        default=1024,
        gt=0,
        description="number of texts in each form: after prompts of unrelated training facts, after neutral openings, "
        "and after nothing",
    )
    max_tokens: int = Field(default=20, gt=0, description="tokens of a text, at most; it may end before, even at once")
    sampled: float = Field(
        default=0.5, ge=0, le=1, description="share of texts that are drawn at temperature 1; the others are greedy"
    )
    forms: Literal["auto", "raw", "chat"] = Field(
        default="auto", description="form of the prompts; `auto`: raw, and in the chat template where there is one"
    )
    folder: str | None = Field(
        default=None, description="folder that keeps the texts for other runs; default: the user's cache folder"
    )


class BatchConfig(Section):
    """How the work is cut into batches; no result depends on it."""

    token_budget: int = Field(default=1024, gt=0, description="padded tokens per LM micro-batch")
    hypernet_rows: int = Field(default=2048, gt=0, description="tokens per hyper-network batch")
    cache_mb: int = Field(
        default=1024, ge=0, description="MB for results of the LM that later epochs need again; 0: none are kept"
    )
    cache_dir: str | None = Field(
        default=None, description="folder that keeps them, for other runs too; default: each LM process's memory"
    )


class LMConfig(Section):
    """How the LM workers hold the language model."""

    sharding: Literal["none", "zero3"] = Field(
        default="none", description="`zero3`: DeepSpeed shards it over the LM workers; `none`: each holds all of it"
    )


class ClusterConfig(Section):
    """The processes that do the work; no result depends on them."""

    lm_workers: int = Field(default=1, gt=0, description="Ray Train workers that hold the language model")
    lm_cpus: float = Field(default=1.0, ge=0, description="CPUs for each of them")
    lm_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs for each; default: 1, or 0.5 if one worker and one actor share the cluster's only one, or 0 "
        "if it has none; fewer GPUs than workers are an error. With model.device=cpu always 0",
    )
    lm_resources: dict[str, float] = Field(default={}, description="custom Ray resources for each")
    hypernet_actors: int = Field(default=1, gt=0, description="actors that run the hyper-network and the solve")
    hypernet_cpus: float = Field(default=1.0, ge=0, description="CPUs for each of them")
    hypernet_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs for each; default: 1 if the LM workers leave enough for all actors, 0.5 if one actor shares "
        "the cluster's only one with one worker, else 0. With model.device=cpu always 0",
    )
    hypernet_resources: dict[str, float] = Field(default={}, description="custom Ray resources for each")
    overlap: bool | None = Field(
        default=None,
        description="whether the next step is traced while the actors back-propagate this one; "
        "default: yes, unless both would share one machine's cores",
    )
    wait_seconds: float = Field(
        default=300, gt=0, description="how long to wait for free resources, or for a lost actor"
    )
    stall_seconds: float = Field(
        default=1800, gt=0, description="a run without a finished step for so long counts as hanging and ends"
    )
    max_failures: int = Field(
        default=8, ge=0, description="losses of LM workers, and as many of hypernet actors, survived between two steps"
    )


class TrackingConfig(Section):
    """Tracking by MLflow."""

    enabled: bool = Field(default=True, description="whether runs are tracked")
    uri: str | None = Field(
        default=None, description="MLflow's store; default: MLFLOW_TRACKING_URI, else mlflow.db beside the run"
    )
    experiment: str = Field(default="malmen", description="MLflow experiment of the runs")
    registered_model: str | None = Field(
        default=None, description="name of the model in the registry; default: malmen-MODEL"
    )


class Config(Section):
    """All settings of a run."""

    seed: int = Field(default=0, description="seed of weights, data order and sampling")
    model: ModelConfig = ModelConfig()
    editor: EditorConfig = EditorConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    own_text: OwnTextConfig = OwnTextConfig()
    batch: BatchConfig = BatchConfig()
    lm: LMConfig = LMConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()
    baselines: BaselinesConfig = BaselinesConfig()
