"""The peak memory of a step."""

from __future__ import annotations

import pytest

from malmen.tune.experiments.memory import measure_memory
from malmen.tune.experiments.settings import ExperimentConfig, base_config


@pytest.mark.slow
def test_the_memory_of_a_step_is_measured_and_running_out_is_told(settings: ExperimentConfig) -> None:
    config = base_config(settings)
    training = config.training.model_copy(update={"min_edits": 2, "num_edits": 4})
    config = config.model_copy(update={"training": training})  # editors that have seen different numbers of edits
    found = measure_memory(config, "concatenated", 16, 0, 4.0)  # it asserts that the step has 16
    assert found["peak_mb"] >= found["before_mb"] > 50
    lost = measure_memory(config, "decomposed", 4, 1, 0.05)
    assert lost == {"way": "decomposed", "edits": 4, "seed": 1, "ran_out": 0.05}
