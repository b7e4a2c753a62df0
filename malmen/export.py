"""An edit in files that need no malmen: a delta, a LoRA adapter, or a merged checkpoint. Only a classifier's need
`malmen.lm.FirstTokenClassifier`, because no library has its class.

This is the only place that writes W + S, and it writes to files: the given language model stays as it is.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

import malmen
from malmen.data.tokens import Kind
from malmen.errors import EditError, UsageError
from malmen.lm.layers import find_layers, is_conv1d
from malmen.lm.model import LanguageModel, find_source
from malmen.lm.overlay import Shifts, linear_of
from malmen.runs.files import atomic_file, atomic_folder, write_json

ExportKind = Literal["delta", "lora", "merged"]
FORMAT = "malmen-export/1"
MANIFEST = "manifest.json"
_Notes = dict[str, dict[str, Any]]  # layer -> what the manifest says of it
_KINDS: dict[Kind, tuple[str, str | None]] = {  # what loads a model of this kind, and what PEFT calls it
    "decoder": ("transformers.AutoModelForCausalLM", "CAUSAL_LM"),
    "encoder-decoder": ("transformers.AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "classifier": ("malmen.lm.FirstTokenClassifier", None),  # PEFT would look for a SEQ_CLS head in the adapter
}
_SNIPPETS: dict[ExportKind, str] = {
    "delta": """from safetensors.torch import load_file
{load}
for name, delta in load_file("delta.safetensors").items():
    model.get_parameter(name).data += delta.to(model.device)""",
    "lora": 'from peft import PeftModel\n{load}\nmodel = PeftModel.from_pretrained(model, ".")',
    "merged": "{load}",
}


@torch.no_grad()
def export_edit(
    kind: ExportKind, folder: Path, lm: LanguageModel, shifts: Shifts, *, facts: Sequence[Mapping[str, Any]] = (),
    model_name: str, max_rank: int = 512, info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write `folder`, completely or not at all, and return its manifest, which holds `facts` and `info` as given.

    `model_name` is where others find the base model; `max_rank` is the largest rank of a LoRA layer.
    """
    if kind not in get_args(ExportKind):
        raise UsageError(f"unknown kind of export {kind!r}: expected {', '.join(get_args(ExportKind))}")
    if max_rank < 1:
        raise UsageError(f"max_rank is {max_rank}: expected 1 or more")
    _check_target(folder, model_name)
    stored = _check_shifts(lm, shifts)
    commit = getattr(cast(Any, lm.model).config, "_commit_hash", None)  # of a model from the hub
    base = {
        "name": model_name,
        "revision": None if Path(find_source(model_name)[0]).exists() else commit,
        "fingerprint": lm.fingerprint(),
        "kind": lm.kind,
        "dtype": str(lm.dtype).removeprefix("torch."),
    }
    with atomic_folder(folder, replaces=MANIFEST) as fresh:
        notes = {name: _sizes(lm, name, shift) for name, shift in stored.items()}
        if kind == "delta":
            deltas = {f"{name}.weight": _as_weight(lm, name, shift).contiguous() for name, shift in stored.items()}
            save_file(deltas, fresh / "delta.safetensors", metadata={"format": "pt"})
        elif kind == "lora":
            _write_lora(fresh, lm, stored, notes, base, max_rank)
        else:
            _write_merged(fresh, lm, stored, notes)
        atomic_file(fresh / "README.md", _readme(kind, base, stored, len(facts)))
        files = sorted(path for path in fresh.rglob("*") if path.is_file())
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "base_model": base,
            "malmen": malmen.__version__,
            "files": {path.relative_to(fresh).as_posix(): _checksum(path) for path in files},
            "tensors": {f"{name}.weight": note for name, note in notes.items()},
            "facts": [dict(fact) for fact in facts],
            "info": dict(info or {}),
        }
        write_json(fresh / MANIFEST, manifest)
    return manifest


def _check_target(folder: Path, model_name: str) -> None:
    """An earlier export may be replaced; another program's manifest.json, or the base model, may not."""
    if (folder / MANIFEST).exists():
        _check_manifest(folder / MANIFEST)
    source = Path(find_source(model_name)[0])
    if source.exists() and source.resolve().is_relative_to(folder.resolve()):
        raise EditError(
            f"{folder} holds the base model {model_name!r}, which must not be replaced: choose another folder"
        )


def _check_shifts(lm: LanguageModel, shifts: Shifts) -> dict[str, Tensor]:
    """The shifts (value, key) on the CPU in the type they are stored in: float32, or the float64 of a float64 model."""
    if not shifts:
        raise EditError("the edit changes no layer, so nothing can be exported")
    stored = {}
    for layer in find_layers(lm.model, list(shifts)):  # refuses what is no layer of this model, and names the nearest
        shift = shifts[layer.name]
        double = linear_of(lm, layer.name, shift).get_parameter("weight").dtype == torch.float64
        stored[layer.name] = shift.detach().to("cpu", torch.float64 if double else torch.float32)
        broken = int((~stored[layer.name].isfinite()).sum())
        if broken:
            raise EditError(f"the shift of {layer.name!r} has {broken} numbers that are not finite; expected none")
    return stored


def _write_lora(
    folder: Path, lm: LanguageModel, shifts: Shifts, notes: _Notes, base: dict[str, Any], max_rank: int
) -> None:
    """PEFT's adapter: each layer adds B(A·key). The errors are those of the factors as they are stored."""
    factors: dict[str, Tensor] = {}
    for name, shift in shifts.items():
        down, up, full_rank = _factorise(shift, max_rank)
        factors[f"base_model.model.{name}.lora_A.weight"] = down
        factors[f"base_model.model.{name}.lora_B.weight"] = up
        error = float((up.double() @ down.double() - shift).norm()) / (notes[name]["norm"] or 1)
        notes[name] |= {"rank": len(down), "full_rank": full_rank, "relative_error": error}
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    ranks = {name: note["rank"] for name, note in notes.items()}
    largest = max(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != largest}  # not all readers know patterns
    config = {
        "peft_type": "LORA",
        "task_type": _KINDS[lm.kind][1],
        "base_model_name_or_path": find_source(base["name"])[0],
        "revision": base["revision"],
        "target_modules": list(ranks),
        "fan_in_fan_out": any(is_conv1d(lm.model.get_submodule(name)) for name in ranks),
        "r": largest,
        "lora_alpha": largest,  # the rank, so that PEFT scales by 1
        "rank_pattern": others,
        "alpha_pattern": others,
    }
    write_json(folder / "adapter_config.json", config)


def _factorise(shift: Tensor, max_rank: int) -> tuple[Tensor, Tensor, int]:
    """A (rank, key) and B (value, rank) with S ≈ BA, and the rank that S has beyond rounding.

    S* has at most the rank of the tokens it was solved for (the dual form, §4.1); the rest of its singular values are
    rounding. What is left out for that reason weighs, all together, about as much as storing S in its type does.
    """
    left, values, right = torch.linalg.svd(shift.double(), full_matrices=False)
    tails = values.square().flip(0).cumsum(0).flip(0).sqrt()  # ‖S − S_r‖ for r = 0, 1, …
    tolerance = max(4 * torch.finfo(shift.dtype).eps, 1e-14)  # for float64 the SVD's own digits are the limit
    full_rank = int((tails > tolerance * values.norm()).sum())
    rank = max(1, min(full_rank, max_rank))  # PEFT knows no rank 0: a layer that does not change has factors of zeros
    root = values[:rank].sqrt()  # evenly to both sides, so that both keep their digits
    down, up = root[:, None] * right[:rank], left[:, :rank] * root
    return down.to(shift.dtype).contiguous(), up.to(shift.dtype).contiguous(), full_rank


def _write_merged(folder: Path, lm: LanguageModel, shifts: Shifts, notes: _Notes) -> None:
    """The whole model with W + S in the model's own type, and which share of S that type's rounding takes."""
    model = cast(Any, lm.model)
    packed = {str(weight.dtype) for weight in model.parameters() if weight.dtype.itemsize < 2}
    if packed:
        raise EditError(f"the base model's weights are {', '.join(sorted(packed))}: W + S cannot be written; use lora")
    state = model.state_dict()  # tied weights stay one tensor with two names: save_pretrained knows which to write
    for name, shift in shifts.items():
        weight = state[f"{name}.weight"]
        exact = weight.cpu().double() + _as_weight(lm, name, shift)
        state[f"{name}.weight"] = rounded = exact.to(weight.dtype)
        if not rounded.isfinite().all():
            raise EditError(f"W + S of layer {name!r} is beyond {weight.dtype}; load the base model in float32")
        notes[name]["rounding_error"] = float((rounded - exact).norm()) / (notes[name]["norm"] or 1)
    _save_model(folder, model, state)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)


def _save_model(folder: Path, model: Any, state: dict[str, Tensor]) -> None:
    """`save_pretrained` writes into the model's config, so it gets a second handle on the same modules.

    A model from GGUF was unpacked when it was loaded: what says that it is packed is left out. The settings for
    generating are written as they came, for `save_pretrained` refuses some that models ship.
    """
    handle = copy.copy(model)
    handle.config = copy.deepcopy(model.config)
    handle.__dict__.pop("hf_quantizer", None)
    handle.config.__dict__.pop("quantization_config", None)
    handle.generation_config = GenerationConfig()
    handle.save_pretrained(folder, state_dict=state)
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")


def _readme(kind: ExportKind, base: dict[str, Any], shifts: Shifts, facts: int) -> str:
    """How to load it, as code that runs in this folder."""
    home, _, loader = _KINDS[base["kind"]][0].rpartition(".")
    source, options = find_source(base["name"])
    options |= {"revision": base["revision"]} if base["revision"] else {}
    # In half precision W + S would swallow a small S, so a delta is added in the type it is stored in.
    options["dtype"] = str(next(iter(shifts.values())).dtype)[len("torch.") :] if kind == "delta" else base["dtype"]
    given = [repr(source), *(f"{name}={value!r}" for name, value in options.items())]
    arguments = '"."' if kind == "merged" else ", ".join(given)
    load = f"from {home} import {loader}\nmodel = {loader}.from_pretrained({arguments})"
    return (
        f"# An edit of {base['name']}\n\n"
        f"{len(shifts)} layers changed for {facts} facts, written as `{kind}` by malmen {malmen.__version__}. "
        f"The base model's fingerprint is {base['fingerprint']}; {MANIFEST} has the facts, norms and checksums.\n\n"
        f"To load it, in this folder:\n\n```python\n{_SNIPPETS[kind].format(load=load)}\n```\n"
    )


def _sizes(lm: LanguageModel, name: str, shift: Tensor) -> dict[str, Any]:
    norm, weight_norm = float(shift.double().norm()), lm.weight_norm(name)
    shape = list(_as_weight(lm, name, shift).shape)
    return {"shape": shape, "norm": norm, "ratio": norm / weight_norm if weight_norm else None}


def _as_weight(lm: LanguageModel, name: str, shift: Tensor) -> Tensor:
    """A shift (value, key) oriented as the layer's weight; by type, because shapes of square layers do not tell."""
    return shift.T if is_conv1d(lm.model.get_submodule(name)) else shift


def _checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _check_manifest(path: Path) -> None:
    """EditError unless it is the manifest of an export, which may be replaced."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EditError(f"{path} is not JSON: {error}; it is damaged, or no manifest of an export") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        stated = manifest.get("format") if isinstance(manifest, dict) else None
        raise EditError(f"{path} is no manifest of an export: its format is {stated!r}, expected {FORMAT!r}")
