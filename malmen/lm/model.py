"""The language model being edited: loading it, and running it only as far as needed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertModel,
    BertPreTrainedModel,
    PretrainedConfig,
)
from transformers.activations import NewGELUActivation
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.gguf import read_gguf_metadata
from transformers.modeling_outputs import SequenceClassifierOutput

from malmen.config import SPLIT, Config, DataConfig, ModelConfig
from malmen.data.records import Fact
from malmen.data.tokens import FactEncoder, Kind, TokenBatch, make_batches
from malmen.data.world import WORLD_MODEL, check_world_model
from malmen.errors import EditError
from malmen.lm.devices import limit_kernel_cache, resolve_device, resolve_dtype
from malmen.lm.hooks import hooked
from malmen.lm.layers import find_stacks
from malmen.lm.products import use_float32_products

LARGE = 1e9  # parameters; a CPU is too slow for more


class FirstTokenClassifier(BertPreTrainedModel):
    """BERT with one linear map from the first token's last hidden state to one logit (§5, FEVER)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(hidden[:, 0]))


_LOADERS: dict[Kind, Any] = {
    "decoder": AutoModelForCausalLM,
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "classifier": FirstTokenClassifier,
}


def _rounded_sample(tensor: Tensor) -> bytes:
    """Some thousand of its numbers as bfloat16."""
    step = max(1, tensor.numel() // 1024) | 1  # odd, so that it walks through all columns
    return tensor.flatten()[::step].float().to(torch.bfloat16).float().cpu().contiguous().numpy().tobytes()


@dataclass
class LanguageModel:
    """A frozen model with its tokenizer. Edits are added to its outputs (overlay.py), never written into it."""

    model: nn.Module
    tokenizer: Any
    kind: Kind

    def __post_init__(self) -> None:
        limit_kernel_cache()
        self.model.requires_grad_(False).eval()
        _fuse_activations(self.model)
        self.stacks = find_stacks(self.model)
        # Whether its blocks return a tensor or a tuple with it; unknown until one has run (stem.py).
        self.plain_blocks: bool | None = None

    @property
    def device(self) -> torch.device:
        """The device of its weights; of a model spread over several devices, that of its inputs and outputs."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of its weights."""
        return next(self.model.parameters()).dtype

    @property
    def pad_id(self) -> int:
        """The token of padded positions; they are masked, so any token will do."""
        return int(getattr(self.tokenizer, "pad_token_id", None) or 0)

    @property
    def max_positions(self) -> int | None:
        """The most tokens it can read; None without a limit by its position embeddings."""
        config = cast(Any, self.model).config
        return None if self.kind == "encoder-decoder" else getattr(config, "max_position_embeddings", None)

    @property
    def decoder_start(self) -> int:
        """The token that starts an encoder-decoder's answers."""
        return int(getattr(cast(Any, self.model).config, "decoder_start_token_id", None) or 0)

    def blocks(self, stack: str) -> nn.ModuleList:
        """The transformer blocks of a stack, from below."""
        return cast(nn.ModuleList, self.model.get_submodule(self.stacks[stack]))

    def logits(self, batch: TokenBatch) -> Tensor:
        """Logits (answer tokens, vocabulary) at the answer positions only, in the order of `batch.targets`."""
        if self.kind == "classifier":
            logit = cast(Tensor, self.model(**batch.inputs).logits)
            return torch.cat((torch.zeros_like(logit), logit), dim=-1)  # log-softmax of (0, z) is log-sigmoid of ∓z
        inputs = dict(batch.inputs)
        if self.kind == "decoder":
            inputs.pop("attention_mask")  # padding is at the end, where causal attention never looks

        def keep_answers(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (args[0][batch.answer_mask.to(args[0].device)][None],)

        head = cast(Any, self.model).get_output_embeddings()
        with hooked([(head, keep_answers)], before=True):
            return cast(Tensor, self.model(**inputs, use_cache=False).logits[0])

    def log_probs(self, batch: TokenBatch) -> Tensor:
        """log p(· | x, y before it) at the answer positions (answer tokens, vocabulary), at least in float32."""
        logits = self.logits(batch)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers by name, sorted."""
        yield from sorted(self.model.state_dict().items())

    def fingerprint(self) -> str:
        """A hash of architecture and weights, then one of the tables that the model computes and no file holds (RoPE's
        frequencies), if there are any. Weights are a sample of each tensor, rounded to bf16 so that dtypes agree."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(_rounded_sample(tensor))
        weights = digest.hexdigest()[:16]
        stored = self.model.state_dict().keys()
        # A set: layers may share a table. A table in half precision is another one, whatever its rounded values.
        tables = {
            f"{tuple(table.shape)} {table.dtype.itemsize < 4} ".encode() + _rounded_sample(table)
            for name, table in self.model.named_buffers()
            if name not in stored and table.is_floating_point()
        }
        return f"{weights}-{hashlib.sha256(b''.join(sorted(tables))).hexdigest()[:8]}" if tables else weights

    def slow_place(self) -> str | None:
        """A warning if a model this large is on a CPU, where a step takes minutes; else None."""
        size = sum(getattr(weight, "ds_numel", weight.numel()) for weight in self.model.parameters())
        if self.device.type != "cpu" or size < LARGE:
            return None
        return (
            f"this model of {size / 1e9:.1f} B parameters is on a CPU: a step will take minutes to hours. If there are "
            "GPUs, check model.device, cluster.lm_gpus and the resources of the Ray cluster"
        )

    def weight_norm(self, layer: str) -> float:
        """‖W‖ of a layer, in float64."""
        return float(self.model.get_parameter(f"{layer}.weight").double().norm())


def _fuse_activations(model: nn.Module) -> None:
    """Compute GPT-2's GELU by one operation: transformers' class takes seven, and keeps what each gives for the way
    back."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


# --- loading -----------------------------------------------------------------------------------------


def load_lm(config: ModelConfig | str) -> LanguageModel:
    """Load a model from a local folder, a hub name, a GGUF file, or `builtin`. EditError if it cannot be loaded."""
    config = ModelConfig(name=config) if isinstance(config, str) else config
    use_float32_products(config)
    name, options = _location(config)
    device, dtype = resolve_device(config), model_dtype(config)
    placement = _placement(config, device)
    with _loading_errors(config):
        kind, _ = _kind_and_config(config)
        model, loading = _LOADERS[kind].from_pretrained(
            name, dtype=dtype, output_loading_info=True, **options, **placement
        )
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if "gguf_file" in options:
            _write_bos(tokenizer, Path(name, options["gguf_file"]))
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:4])
        raise EditError(
            f"the model {config.name!r} has no weights for {missing}: they would be random; "
            "a classifier needs its fine-tuned head, see docs/models.md"
        )
    if config.device == SPLIT and {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()):
        raise EditError(
            f"model.device is `split`, but the {torch.cuda.device_count()} GPUs that this process sees do not hold "
            f"{config.name!r}: give it more GPUs (cluster.lm_gpus, reader.gpus), or a smaller model.dtype"
        )
    return LanguageModel(model if placement else model.to(device), tokenizer, kind)


def _write_bos(tokenizer: Any, file: Path) -> None:
    """Begin texts with BOS if the GGUF file says so, or says nothing and has a SentencePiece vocabulary: llama.cpp's
    rule. transformers does not read it, and Gemma without BOS writes nonsense."""
    metadata, _ = read_gguf_metadata(str(file))
    if metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"):
        tokenizer.add_bos_token = True  # writes none if the file names no BOS


def _placement(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Where from_pretrained puts each weight as it reads it: on the card, without the whole model in the host's memory
    before. On a CPU it is there anyway, and ZeRO-3 places its parts itself."""
    if config.device == SPLIT:
        return {"device_map": "balanced"}
    return {} if device.type == "cpu" or is_deepspeed_zero3_enabled() else {"device_map": {"": device}}


def model_dtype(config: ModelConfig) -> torch.dtype:
    """The type this process would give the model's weights."""
    if config.dtype != "auto":
        return resolve_dtype(config, 0)
    with _loading_errors(config):
        return resolve_dtype(config, int(_kind_and_config(config)[1].hidden_size))


def load_skeleton(config: ModelConfig, *, buffers: bool = False) -> tuple[nn.Module, Kind]:
    """The model without weights, on torch's meta device: its modules and shapes. Takes no memory; `buffers`: those are
    computed, in float32 on the CPU."""
    with _loading_errors(config):
        kind, hf_config = _kind_and_config(config)
        with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
            loader = _LOADERS[kind]
            return loader(hf_config) if kind == "classifier" else loader.from_config(hf_config), kind


@contextmanager
def _loading_errors(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, struct.error) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # from the second on: advice
        raise EditError(
            f"cannot load the model {config.name!r}: {lines[0] if lines else type(error).__name__} "
            "(expected `builtin`, a folder with config.json and safetensors, a .gguf file, or a hub name)"
        ) from error


def _kind_and_config(config: ModelConfig) -> tuple[Kind, PretrainedConfig]:
    name, options = _location(config)
    hf_config = AutoConfig.from_pretrained(name, **options)
    if config.kind != "auto":
        return config.kind, hf_config
    if getattr(hf_config, "is_encoder_decoder", False):
        return "encoder-decoder", hf_config
    return ("classifier" if hf_config.model_type == "bert" else "decoder"), hf_config


def _location(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    if config.name == "builtin":
        check_world_model()
    source, options = find_source(config.name)
    if options and not (Path(source) / options["gguf_file"]).is_file():
        raise EditError(f"the model file {config.name} does not exist")
    if config.revision and not Path(source).is_dir():
        return source, {"revision": config.revision}
    return source, options


def find_source(model_name: str) -> tuple[str, dict[str, str]]:
    """What transformers is given to find a model, from wherever it is called."""
    path = WORLD_MODEL if model_name == "builtin" else Path(model_name).expanduser()
    if path.suffix == ".gguf":
        return str(path.parent.resolve()), {"gguf_file": path.name}
    return (str(path.resolve()) if path.is_dir() else model_name), {}


def fact_encoder(lm: LanguageModel, data: DataConfig) -> FactEncoder:
    """The encoder from facts to tokens for this model."""
    return FactEncoder(
        lm.tokenizer,
        lm.kind,
        prompt_format=data.prompt_format,
        max_length=min(data.max_length, lm.max_positions or data.max_length),
        overlong=data.overlong,
        append_eos=data.append_eos,
        decoder_start=lm.decoder_start,
    )


def encode_batches(lm: LanguageModel, facts: Sequence[Fact], config: Config) -> list[TokenBatch]:
    """The facts in micro-batches within the config's token budget."""
    encoder = fact_encoder(lm, config.data)
    return make_batches([encoder.encode(fact) for fact in facts], config.batch.token_budget, lm.pad_id)
