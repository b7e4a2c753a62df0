"""A T5 of Hugging Face from two dynamically quantised ONNX graphs, an encoder and a decoder with its head."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

HEAD_SIZE = 64  # no tensor shows it; T5's in every size but XXL
_PREFIXES = ((r"^/?enc[/.]", "encoder."), (r"^/?m[/.]", ""))  # the module names of the two exported graphs


def dequantised(values: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """scale · (q − zero point) in float32; scale and zero point belong to the tensor or to each last-axis column."""
    return (values.to(torch.float32) - zero_point.to(torch.float32)) * scale.to(torch.float32)


def module_name(name: str) -> str:
    """The T5 parameter of an initialiser or of a MatMul's node."""
    for pattern, prefix in _PREFIXES:
        name = re.sub(pattern, prefix, name)
    return name.removesuffix("/MatMul_quant").replace("/", ".")


def graph_weights(path: Path) -> dict[str, Tensor]:
    """The float32 weights of a graph by their names in T5."""
    import numpy as np
    import onnx  # only here: nothing else of the repository needs it

    graph = onnx.load(str(path)).graph
    arrays = {item.name: torch.from_numpy(np.array(onnx.numpy_helper.to_array(item))) for item in graph.initializer}

    def whole(name: str) -> Tensor:
        stem = name.removesuffix("_quantized")
        return dequantised(arrays[name], arrays[f"{stem}_scale"], arrays[f"{stem}_zero_point"])

    weights: dict[str, Tensor] = {}
    for node in graph.node:  # a linear map is x @ W, so W is transposed; its initialiser lost its name
        if node.op_type == "MatMulInteger":
            weights[f"{module_name(node.name)}.weight"] = whole(node.input[1]).T.contiguous()
    for name, array in arrays.items():
        if name.endswith(".weight_quantized"):
            weights[module_name(name.removesuffix("_quantized"))] = whole(name)
        elif name.endswith(".weight"):
            weights[module_name(name)] = array.to(torch.float32)
    return weights


def t5_config(weights: Mapping[str, Tensor]) -> T5Config:
    """The config that the shapes of the weights imply: gated, as v1.1."""
    vocabulary, width = weights["shared.weight"].shape
    buckets, heads = weights["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].shape
    wide = weights["encoder.block.0.layer.0.SelfAttention.q.weight"].shape[0]
    blocks = [
        len({name.split(".")[2] for name in weights if name.startswith(f"{stack}.block.")})
        for stack in ("encoder", "decoder")
    ]
    assert wide == heads * HEAD_SIZE, f"{wide} outputs of {heads} heads, expected {HEAD_SIZE} each"
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "d_model": width, "d_kv": HEAD_SIZE, "num_heads": heads}
    sizes |= {"d_ff": weights["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0]}
    sizes |= {"num_layers": blocks[0], "num_decoder_layers": blocks[1], "relative_attention_num_buckets": buckets}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes, **ids)


def write_model(weights: Mapping[str, Tensor], out: Path) -> None:
    """The model's folder as the public checkpoints have it: an untied head, which T5Config alone cannot say."""
    config = t5_config(weights)
    with torch.device("meta"):  # says which parameters there must be; the class would tie head and embedding
        expected = {name: weight.shape for name, weight in T5ForConditionalGeneration(config).named_parameters()}
    given = {name: weight.shape for name, weight in weights.items()}
    expected["lm_head.weight"] = expected["shared.weight"]
    differing = {name for name in expected | given if expected.get(name) != given.get(name)}
    assert not differing, f"missing, unknown or of another shape: {sorted(differing)[:4]}"
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, out / "model.safetensors", {"format": "pt"}
    )
    fields = config.to_dict() | {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def convert(encoder: Path, decoder: Path, tokenizer: Path, out: Path) -> None:
    """Write the model's folder."""
    weights = graph_weights(encoder) | graph_weights(decoder)
    own = weights.pop("encoder.embed_tokens.weight")
    assert torch.equal(own, weights["shared.weight"]), "the encoder has word embeddings of its own"
    write_model(weights, out)
    words = Tokenizer.from_file(str(tokenizer))
    words.no_truncation()  # the file cuts and pads as its own program wants
    words.no_padding()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(out)
