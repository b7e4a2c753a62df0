"""The language model cut over the LM workers by DeepSpeed's ZeRO-3: each holds a part of every weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from malmen.config import ModelConfig
from malmen.errors import EditError
from malmen.lm.devices import resolve_dtype
from malmen.lm.model import LanguageModel, load_lm
from malmen.platform.allocator import memory_given_back

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,  # asked for by DeepSpeed; nothing here is trained by it
    "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
}


class ShardedLanguageModel(LanguageModel):
    """A language model whose whole weights exist only while a layer runs."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers by name, one whole at a time. All ranks must go through them together."""
        import deepspeed

        found = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters(remove_duplicate=False))}
        for name in sorted(self.model.state_dict()):
            tensor = found[name]
            if not hasattr(tensor, "ds_id"):
                yield name, tensor
                continue
            with deepspeed.zero.GatheredParameters([tensor]):
                yield name, tensor.data.clone()

    def weight_norm(self, layer: str) -> float:
        """‖W‖ of a layer. All ranks must ask together."""
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
    settings = {**_CONFIG, "bf16": {"enabled": resolve_dtype(config) == torch.bfloat16}}
    if resolve_dtype(config) == torch.float64:  # zero.Init would make it float32; such models are small and for tests
        lm = load_lm(config)
    else:
        in_parts = HfDeepSpeedConfig(settings)  # from_pretrained asks whether such an object is alive
        with memory_given_back():  # each weight is whole for a moment
            lm = load_lm(config)
        del in_parts
    engine, *_ = deepspeed.initialize(model=lm.model, config=settings)
    return ShardedLanguageModel(engine.module, lm.tokenizer, lm.kind)
