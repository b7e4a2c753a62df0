"""How much rephrasings gain for how much drift, of editors that are not trained yet. JSON on stdout.

    python benchmarks/frontier.py --config smollm2-135m model.name=… data.train=… data.validation=… \
        --variant "editor.attention=false" --variant "editor.layers=last:18"

A variant is the config with these settings; the config itself comes first. Its editor is fresh: the value differences
are normalised gradients. One step's edits are solved, and their shifts laid over the model times 0.25, 0.42, …, until
the drift exceeds the largest `--drift`. What is printed is L_gen at each of these values of L_loc, interpolated over
its root: the lower, the more edits carry over before anything else changes. It takes a minute or two per variant, on
training rows only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from malmen.config import Config, load_config
from malmen.data.tokens import MetaBatch, make_batches
from malmen.lm.losses import kl, nll
from malmen.lm.model import LanguageModel, load_lm
from malmen.lm.overlay import Shifts, edited
from malmen.lm.trace import trace
from malmen.lm_side import MetaLosses
from malmen.training import make_editor, make_sampler

CONFIGS = Path(__file__).parents[1] / "platform" / "configs"
FIRST, FACTOR, LARGEST = 0.25, 1.7, 100.0  # what the shifts are multiplied by


class Point(NamedTuple):
    """An edit at one strength."""

    strength: float
    losses: MetaLosses


@torch.no_grad()
def losses_of(lm: LanguageModel, batch: MetaBatch, shifts: Shifts, token_budget: int) -> MetaLosses:
    """L_gen and L_loc of this edit."""
    gained = drifted = 0.0
    for part in make_batches(batch.equivalents, token_budget, lm.pad_id):
        with edited(lm, shifts):
            gained += float(nll(lm.log_probs(part), part.targets))
    for part in make_batches(batch.unrelated, token_budget, lm.pad_id):
        reference = lm.log_probs(part)
        with edited(lm, shifts):
            drifted += float(kl(reference, lm.log_probs(part)))
    return MetaLosses(gained / len(batch.equivalents), drifted / len(batch.unrelated))


def frontier(lm: LanguageModel, config: Config, most: float) -> Iterator[Point]:
    """Edits of growing strength, the unedited model first, until the drift exceeds `most`."""
    sampler = make_sampler(lm, config)
    editor, batch = make_editor(lm, config, sampler), sampler.batch(0)
    budget, tokens = config.batch.token_budget, config.editor.tokens
    traces = [
        trace(lm, editor.layers, make_batches(sampler.batch(step).edits, budget, lm.pad_id), tokens)
        for step in (1, 2, 0)  # the normalisers see more than the edits
    ]
    for part in traces:
        editor.observe(part)
    shifts, strength = editor.solve(traces[-1]).shifts, FIRST
    yield Point(0.0, losses_of(lm, batch, {name: 0 * shift for name, shift in shifts.items()}, budget))
    while strength < LARGEST:
        scaled = {name: strength * shift for name, shift in shifts.items()}
        yield Point(strength, losses := losses_of(lm, batch, scaled, budget))
        if losses.locality > most:
            return
        strength *= FACTOR


def at_drift(points: Sequence[Point], drift: float) -> float | None:
    """L_gen where L_loc is `drift`, linear in its root; None beyond the strongest edit."""
    for (_, low), (_, high) in pairwise(points):
        if low.locality <= drift <= high.locality:
            start, stop = math.sqrt(max(low.locality, 0)), math.sqrt(high.locality)
            share = (math.sqrt(drift) - start) / max(stop - start, 1e-12)
            return low.generalization + share * (high.generalization - low.generalization)
    return None


def main() -> None:
    """Measure each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2-135m", help="a YAML file, or the name of a shipped config")
    parser.add_argument("--variant", action="append", default=[], help="settings as key=value, separated by spaces")
    parser.add_argument("--drift", type=float, nargs="+", default=[0.2, 0.4, 0.8], help="values of L_loc")
    parser.add_argument("settings", nargs="*", help="settings of all variants as key=value")
    args = parser.parse_intermixed_args()
    path = Path(args.config) if Path(args.config).is_file() else CONFIGS / f"{args.config}.yaml"
    lm: LanguageModel | None = None
    rows = []
    for variant in ["", *args.variant]:
        config = load_config(
            path, ["training.num_edits=32", "training.min_edits=null", *args.settings, *variant.split()]
        )
        lm = lm or load_lm(config.model)
        points = list(frontier(lm, config, max(args.drift)))
        gained = {f"L_gen at L_loc {drift:g}": at_drift(points, drift) for drift in args.drift}
        print(variant or "the config", gained, file=sys.stderr, flush=True)
        rows.append({"variant": variant, **gained, "points": [[strength, *losses] for strength, losses in points]})
    print(json.dumps({"config": args.config, "settings": args.settings, "variants": rows}, indent=1))


if __name__ == "__main__":
    main()
