"""Tiny GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from torch import Tensor
from transformers import LlamaForCausalLM

from malmen.data.world import WORLD_MODEL


def write_llama_gguf(
    path: Path,
    model: LlamaForCausalLM,
    quantised: gguf.GGMLQuantizationType | None = None,
    add_bos: bool | None = None,
) -> None:
    """A Llama with the built-in world's tokens; `quantised` is the type of its matrices, the rest is float32.
    `add_bos`: what the file says of texts; None: nothing."""
    config = model.config
    words = json.loads((WORLD_MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary = sorted(words["vocab"], key=words["vocab"].__getitem__)
    assert config.vocab_size == len(vocabulary)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(vocabulary) - 1))
    writer.add_token_merges([" ".join(merge) for merge in words["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith("q_proj.weight"):
            tensor = _interleaved(tensor, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            tensor = _interleaved(tensor, config.num_key_value_heads)
        data = tensor.float().contiguous().numpy()
        kind = None
        if quantised is not None and data.ndim == 2:
            data, kind = gguf.quants.quantize(data, quantised), quantised
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring numbers where transformers turns the halves of a head."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
