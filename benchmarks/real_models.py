"""Models with real weights for editing, from unpacked packages that carry them. JSON on stdout; fetches nothing.

    python benchmarks/real_models.py bert --package DIR --claims FILE --out DIR
    python benchmarks/real_models.py t5 --package DIR --out DIR
    python benchmarks/real_models.py gemma --package DIR --package DIR … --out FILE.gguf

Each makes what `malmen train model.name=…` loads. docs/real-model.md names the packages and shows results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fever_claims import paraphrase, read_claims, split_claims, write_files
from onnx_t5 import convert

from malmen.config import ModelConfig
from malmen.data.built_models import Training, build_classifier
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, load_lm

PROMPTS = {
    "encoder-decoder": ("Translate to German: My name is Arthur.", "What is the capital of France?"),
    "decoder": ("The capital of France is", "Water is made of hydrogen and"),
}


def find_one(folders: Iterable[Path], pattern: str) -> Path:
    """The one file below the folders whose name matches."""
    matches = sorted({path for folder in folders for path in folder.rglob(pattern)})
    if len(matches) != 1:
        raise EditError(f"expected one {pattern} below the packages, found {len(matches)}: give the unpacked package")
    return matches[0]


def join_parts(parts: Sequence[Path], out: Path) -> str:
    """Write the parts in the order of their names into one file; its SHA-256."""
    ordered = sorted(parts, key=lambda part: part.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".part")
    with unfinished.open("wb") as joined:
        for part in ordered:
            with part.open("rb") as source:
                shutil.copyfileobj(source, joined)
    unfinished.replace(out)
    with out.open("rb") as joined:
        return hashlib.file_digest(joined, "sha256").hexdigest()


@torch.no_grad()
def greedy_text(lm: LanguageModel, prompt: str, tokens: int) -> str:
    """What the model says after the prompt, greedily."""
    ids = lm.tokenizer(prompt, return_tensors="pt").input_ids
    written = lm.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0]  # type: ignore[operator]
    return str(lm.tokenizer.decode(written, skip_special_tokens=True))


def report(model: Path, started: float, **more: object) -> dict[str, object]:
    """Load the model as `malmen` does and ask it."""
    lm = load_lm(ModelConfig(name=str(model), device="cpu", dtype="float32"))
    answers = {prompt: greedy_text(lm, prompt, 16) for prompt in PROMPTS[lm.kind]}
    size = sum(weight.numel() for weight in lm.model.parameters())
    seconds = round(time.perf_counter() - started, 1)
    return {"model": str(model), "kind": lm.kind, "parameters": size, **more, "answers": answers, "seconds": seconds}


def make_bert(args: argparse.Namespace) -> dict[str, object]:
    """The paper's appendix: measure on held-out claims after each epoch, then fine-tune on all claims and edit that."""
    weights = find_one([args.package], "model.safetensors").parent
    train, validation = split_claims(
        read_claims(args.claims), validation=args.validation, unrelated=args.unrelated, seed=args.seed
    )
    counts = write_files(args.out, train, validation, args.seed)
    near = sum(paraphrase(row, args.seed) == row.get("near_paraphrase") for row in (*train.edited, *validation.edited))
    training = Training(epochs=args.epochs, lr=args.lr, batch_size=args.batch_size, seed=args.seed)
    measured: list[float | None] = []

    def on_epoch(epoch: int, loss: float, accuracy: float | None) -> None:
        measured.append(None if accuracy is None else round(accuracy, 4))
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy}", file=sys.stderr, flush=True)

    started = time.perf_counter()
    for name, model, measure_on in (("train", "model-train", "held-out"), ("all", "model", "all")):
        print(
            f"fine-tuning on claims-{name}.jsonl, measuring on claims-{measure_on}.jsonl", file=sys.stderr, flush=True
        )
        claims, rows = args.out / f"claims-{name}.jsonl", args.out / f"claims-{measure_on}.jsonl"
        build_classifier(
            str(weights), claims, args.out / model, validation=rows, training=training, device="cpu", on_epoch=on_epoch
        )
    return {
        "model": str(args.out / "model"), "rows": counts, "near_paraphrases": near,
        "held_out_accuracy": measured[: args.epochs], "accuracy_on_all_after_learning_all": measured[args.epochs :],
        "seed": args.seed, "seconds": round(time.perf_counter() - started),
    }  # fmt: skip


def make_t5(args: argparse.Namespace) -> dict[str, object]:
    """A folder of a T5ForConditionalGeneration, of int8 ONNX graphs."""
    started = time.perf_counter()
    files = (find_one([args.package], name) for name in ("encoder.onnx", "decoder.onnx", "tokenizer.json"))
    convert(*files, args.out)
    return report(args.out, started)


def make_gemma(args: argparse.Namespace) -> dict[str, object]:
    """One GGUF file, of its parts."""
    started = time.perf_counter()
    parts = [path for folder in args.package for path in folder.rglob("*.gguf.part*")]
    if not parts:
        raise EditError("no *.gguf.part* below the packages: give every unpacked package with a part")
    digest = join_parts(parts, args.out)
    sums = [path for folder in args.package for path in folder.rglob("SHA256SUMS")]
    if sums and digest not in sums[0].read_text(encoding="utf-8"):
        raise EditError(f"the joined file has the SHA-256 {digest}, which is not in {sums[0]}: is a part missing?")
    return report(args.out, started, parts=len(parts), sha256=digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    bert = commands.add_parser("bert", help="a BERT fine-tuned on claims, and records that reverse their labels")
    bert.add_argument("--package", type=Path, required=True, help="a folder with a BERT in Hugging Face's format")
    bert.add_argument("--claims", type=Path, required=True, help="JSONL with claim, label and perhaps near_paraphrase")
    bert.add_argument("--out", type=Path, required=True, help="a folder for the claims, the edits and the model")
    bert.add_argument("--validation", type=int, default=1000, help="claims held out")
    bert.add_argument("--unrelated", type=float, default=0.25, help="the share of claims that nothing edits")
    bert.add_argument("--epochs", type=int, default=2, help="the paper's: 2, of 105,000 claims")
    bert.add_argument("--lr", type=float, default=3e-5, help="of Adam; default: the paper's")
    bert.add_argument("--batch-size", type=int, default=32, help="claims per step")
    bert.add_argument("--seed", type=int, default=0, help="of the split, the head's weights and the order of claims")
    bert.set_defaults(make=make_bert)
    t5 = commands.add_parser("t5", help="a T5 from int8 ONNX graphs (needs the package onnx)")
    t5.add_argument(
        "--package", type=Path, required=True, help="a folder with encoder.onnx, decoder.onnx, tokenizer.json"
    )
    t5.add_argument("--out", type=Path, required=True, help="the model's folder")
    t5.set_defaults(make=make_t5)
    gemma = commands.add_parser("gemma", help="a GGUF file from its parts")
    gemma.add_argument("--package", type=Path, action="append", required=True, help="a folder with a part; repeat it")
    gemma.add_argument("--out", type=Path, required=True, help="the .gguf file")
    gemma.set_defaults(make=make_gemma)
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, which saving imports, warns on standard output
    try:
        print(json.dumps(args.make(args), ensure_ascii=False))
    except EditError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
