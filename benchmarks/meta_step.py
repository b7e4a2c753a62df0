"""One meta-training step on random weights of a named shape: seconds by stage, memory, FLOPs. JSON on stdout.

    python benchmarks/meta_step.py --model gpt2 --edits 64 [--dtype bfloat16] [--rows zsre.jsonl --tokenizer DIR]

FLOPs are those executed by matrix products (torch's own counter), as a share of the rate of a large float32 product
measured in the same run, by what the step multiplies with (`gemm_gflops`) and by torch's BLAS (`blas_gflops`).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPTJConfig, LlamaConfig

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.tokens import EncodedFact, FactEncoder
from malmen.editor import Editor
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.products import use_float32_products
from malmen.meta import MetaBatch, StepReport, meta_step

SHAPES: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(),
    "gpt2-medium": lambda: GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-xl": lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "gpt-j": lambda: GPTJConfig(),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
}  # fmt: skip


def gemm_rate(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of a large float32 product on this machine, now."""
    one, other = torch.randn(size, size), torch.randn(size, size)
    torch.mm(one, other)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(one, other)
    return 2 * size**3 * repeats / (time.perf_counter() - start)


def drawn_fact(rng: random.Random, vocabulary: int, mean_length: int) -> EncodedFact:
    """zsRE-like: a question and an answer of 1 to 6 tokens, together about `mean_length` tokens."""
    answer = [rng.randrange(vocabulary) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))]
    length = max(4, mean_length - len(answer) + 1 + rng.randint(-4, 4))
    prompt = [rng.randrange(vocabulary) for _ in range(length)]
    return EncodedFact(prompt + answer[:-1], len(prompt) - 1, answer)


def make_step(args: argparse.Namespace, vocabulary: int, step: int) -> MetaBatch:
    """Tuples of one step: real rows where given, else drawn lengths (12 for edits, 14 for unrelated)."""
    rng = random.Random(step)
    if args.rows is None:
        facts = [[drawn_fact(rng, vocabulary, mean) for _ in range(args.edits)] for mean in (12, 12, 14)]
        return MetaBatch(*facts)
    encoder = FactEncoder(AutoTokenizer.from_pretrained(args.tokenizer), "decoder")
    with args.rows.open(encoding="utf-8") as lines, NamedTemporaryFile("w", suffix=".jsonl") as part:
        part.writelines(islice(lines, step * args.edits, (step + 1) * args.edits))  # the whole file would take memory
        part.flush()
        records = read_records(part.name)
    if len(records) < args.edits:
        sys.exit(f"{args.rows} has too few rows for step {step} of {args.edits} edits")
    return MetaBatch(
        [encoder.encode(record.edit) for record in records],
        [encoder.encode(record.equivalents[0]) for record in records],
        [encoder.encode(record.unrelated[0]) for record in records],
    )


def timed_step(lm: LanguageModel, editor: Editor, batch: MetaBatch) -> tuple[float, StepReport]:
    """One step and its seconds."""
    start = time.perf_counter()
    report = meta_step(lm, editor, batch)
    return time.perf_counter() - start, report


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps; one more before them warms up and counts FLOPs, and is timed only if it is the only one."""
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    config = Config.model_validate(
        {
            "model": {"float32_products": args.float32_products},
            "editor": {"layers": args.layers, "rank": args.rank},
            "batch": {"token_budget": args.token_budget, "hypernet_rows": args.hypernet_rows},
        }
    )
    blas = gemm_rate()
    use_float32_products(config.model)
    model = AutoModelForCausalLM.from_config(SHAPES[args.model]()).to(getattr(torch, args.dtype))
    lm = LanguageModel(model, None, "decoder")
    vocabulary = int(lm.model.get_submodule("").config.vocab_size)  # type: ignore[union-attr]
    editor = Editor(find_layers(lm.model, args.layers), config)
    batches = [make_step(args, vocabulary, step) for step in range(args.steps + 1)]
    timed: list[tuple[float, StepReport]] = []
    with FlopCounterMode(display=False) as counter:
        timed.append(timed_step(lm, editor, batches[0]))
    before = gemm_rate()
    if args.steps:
        timed = [timed_step(lm, editor, batch) for batch in batches[1:]]
    rate = (before + gemm_rate()) / 2
    flops, typical = counter.get_total_flops(), statistics.median(seconds for seconds, _ in timed)
    return {
        "model": args.model,
        "dtype": args.dtype,
        "edits": args.edits,
        "steps": args.steps,
        "seconds_per_step": round(typical, 3),
        "stages": {
            stage: round(statistics.median(report.seconds[stage] for _, report in timed), 3)
            for stage in timed[0][1].seconds
        },
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "gflop_per_step": round(flops / 1e9, 1),
        "gemm_gflops": round(rate / 1e9, 1),
        "blas_gflops": round(blas / 1e9, 1),
        "share_of_gemm_rate": round(flops / typical / rate, 3),
        "answer_tokens": sum(len(fact.targets) for fact in batches[-1].edits),
        "rank": args.rank,
        "layers": args.layers,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the language model")
    parser.add_argument("--float32-products", choices=("auto", "blas", "onednn"), default="auto")
    parser.add_argument("--edits", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", default="last:6")
    parser.add_argument("--rank", type=int, default=1920)
    parser.add_argument("--rows", type=Path, help="real rows with the fields of zsRE")
    parser.add_argument("--tokenizer", help="a tokenizer's folder or name, with --rows")
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--hypernet-rows", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if (args.rows is None) != (args.tokenizer is None):
        parser.error("--rows and --tokenizer go together")
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
