"""Settings of small experiments."""

from __future__ import annotations

import pytest

from malmen.methods.registry import METHODS
from malmen.tune.experiments.settings import ExperimentConfig, load_experiment

SMALL = [
    "training.steps=2", "training.num_edits=4", "training.min_edits=2", "editor.layers=last:1", "editor.rank=4",
    "tracking.enabled=false",
    "experiment.seeds=[0, 1]", "experiment.edits=[2, 4]", "experiment.ablation_edits=4", "experiment.rounds=2",
    "experiment.memory_edits=[4]", "experiment.ablations=[sum, no_regularisation]", "baselines.ft.epochs=1",
    "baselines.memit.steps=2", "baselines.lora.epochs=2", "experiment.failures=3",
]  # fmt: skip


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    moments = tmp_path_factory.mktemp("moments")
    methods = f"experiment.methods=[{', '.join(METHODS)}]"  # those too that `fast` leaves out
    return load_experiment(
        "fast", [*SMALL, methods, f"baselines.memit.cache_dir={moments}", "baselines.memit.corpus_tokens=2000"]
    )
