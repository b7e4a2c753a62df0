"""How far a model that ZeRO-3 loads in parts is from the whole one; a process of its own, which prints it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from malmen.config import ModelConfig
from malmen.data.world import WORLD_MODEL
from malmen.lm.model import load_lm
from malmen.platform.sharding import load_sharded_lm


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, max_position_embeddings=512))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # so that attention looks at positions
    return model


def t5_with_its_own_head() -> T5ForConditionalGeneration:
    """As the checkpoints of T5 v1.1; the class ties the head to the embedding."""
    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, **sizes, tie_word_embeddings=False))
    model.lm_head.weight = nn.Parameter(torch.randn(50, 12))
    model.all_tied_weights_keys.pop("lm_head.weight")
    return model


def main(name: str, dtype: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = llama() if name == "llama" else t5_with_its_own_head()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(WORLD_MODEL).save_pretrained(folder)
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ModelConfig(name=str(folder), device="cpu", dtype=dtype)  # type: ignore[arg-type]
    whole, sharded = load_lm(config), load_sharded_lm(config)
    inputs = {"input_ids": torch.randint(50, (1, 400))}
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :10]
    with torch.no_grad():
        logits = [lm.model(**inputs).logits for lm in (whole, sharded)]
    dtypes = sorted({str(buffer.dtype) for _, buffer in sharded.model.named_buffers()})
    equal, same = torch.equal(*logits), whole.fingerprint() == sharded.fingerprint()
    print(json.dumps({"equal": equal, "buffers": dtypes, "same_model": same, "weights": str(sharded.dtype)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
