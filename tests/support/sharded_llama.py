"""How far a Llama that ZeRO-3 loads in bfloat16 is from the whole one; a process of its own, which prints it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from malmen.config import ModelConfig
from malmen.data.world import WORLD_MODEL
from malmen.lm.model import load_lm
from malmen.platform.sharding import load_sharded_lm


def main(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, max_position_embeddings=512))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # so that attention looks at positions
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(WORLD_MODEL).save_pretrained(folder)
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ModelConfig(name=str(folder), device="cpu", dtype="bfloat16")
    whole, sharded = load_lm(config), load_sharded_lm(config)
    ids = torch.randint(50, (1, 400))
    with torch.no_grad():
        logits = [lm.model(input_ids=ids).logits for lm in (whole, sharded)]
    dtypes = sorted({str(buffer.dtype) for _, buffer in sharded.model.named_buffers()})
    equal, same = torch.equal(*logits), whole.fingerprint() == sharded.fingerprint()
    print(json.dumps({"equal": equal, "buffers": dtypes, "same_model": same, "weights": str(sharded.dtype)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
