"""The language model cut over the LM workers by DeepSpeed's ZeRO-3: each holds a part of every weight."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from malmen.config import ModelConfig
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, load_lm, load_skeleton, model_dtype

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,  # DeepSpeed needs it; it trains nothing here
    "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
}

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_SMALL, _LARGE = 2**20, 2**25  # larger blocks are returned at once: while loading, and afterwards (glibc's maximum)


class ShardedLanguageModel(LanguageModel):
    """A language model whose whole weights exist only while a layer runs."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers by name, gathered one at a time. All ranks must iterate together."""
        import deepspeed

        tensors = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters(remove_duplicate=False))}
        for name in sorted(self.model.state_dict()):
            tensor = tensors[name]
            if not hasattr(tensor, "ds_id"):
                yield name, tensor
                continue
            with deepspeed.zero.GatheredParameters([tensor]):
                yield name, tensor.data.clone()

    def weight_norm(self, layer: str) -> float:
        """‖W‖ of a layer. All ranks must call it together."""
        import deepspeed

        weight = self.model.get_parameter(f"{layer}.weight")
        with deepspeed.zero.GatheredParameters([weight]):
            return float(weight.double().norm())


def load_sharded_lm(config: ModelConfig) -> LanguageModel:
    """The model, loaded in parts: no rank ever holds all of it. Needs torch's process group."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    if config.name.endswith(".gguf"):
        raise EditError(
            f"lm.sharding=zero3 cannot load the GGUF file {config.name!r} in parts; use lm.sharding=none, or save it "
            "with transformers' save_pretrained and give that folder"
        )
    # A C++ extension for collectives in shared memory would be compiled at the first initialize, for two minutes, and
    # fail without a compiler. torch's own collectives do. The table is private: where it is gone, so is this shortcut.
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    settings = {**_CONFIG, "bf16": {"enabled": model_dtype(config) == torch.bfloat16}}
    if model_dtype(config) == torch.float64:  # zero.Init would make it float32; such models are small and for tests
        lm = load_lm(config)
    else:
        in_parts = HfDeepSpeedConfig(settings)  # from_pretrained asks whether such an object is alive
        with memory_given_back(), ties_compared_whole():  # each weight is whole for a moment
            lm = load_lm(config)
        del in_parts
    engine, *_ = deepspeed.initialize(model=lm.model, config=settings)
    if model_dtype(config) == torch.bfloat16:
        _restore_tables(engine.module, config)
    return ShardedLanguageModel(engine.module, lm.tokenizer, lm.kind)


def _restore_tables(model: nn.Module, config: ModelConfig) -> None:
    """Compute again, in float32, what a model computes and no checkpoint holds: loaded in parts it is in bfloat16, and
    a model with a RoPE table in bfloat16 takes one position for another."""
    skeleton, _ = load_skeleton(config, buffers=True)
    stored = skeleton.state_dict().keys()
    for name, table in skeleton.named_buffers():
        if table.is_floating_point() and name not in stored:
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, table.to(model.get_buffer(name).device))


@contextmanager
def ties_compared_whole() -> Iterator[None]:
    """While transformers decides which weights of a checkpoint are one, gather them.

    It ties the pairs that the model's class names unless the checkpoint holds two different weights. Parts under
    ZeRO-3 look empty and so equal: T5 v1.1, whose head is not its embedding, would lose its head.
    """
    import deepspeed

    tie_weights = PreTrainedModel.tie_weights

    def tie_gathered(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        pairs = self.all_tied_weights_keys.items()
        weights = {name: self.get_parameter(name) for pair in pairs for name in pair}
        with deepspeed.zero.GatheredParameters([weight for weight in weights.values() if hasattr(weight, "ds_id")]):
            tie_weights(self, *args, **kwargs)

    PreTrainedModel.tie_weights = tie_gathered  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.tie_weights = tie_weights  # type: ignore[method-assign]


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Return freed memory to the system at once in blocks above 1 MB; glibc would keep as much as a model again.

    It is slower, so it holds only within the `with` block.
    """
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")  # other libcs lack them
    if known:
        libc.mallopt(_MMAP, _SMALL)
        libc.mallopt(_TRIM, _SMALL)
    try:
        yield
    finally:
        if known:
            libc.malloc_trim(0)
            libc.mallopt(_MMAP, _LARGE)
            libc.mallopt(_TRIM, 2 * _LARGE)
