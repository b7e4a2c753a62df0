"""A run on a cluster of several nodes, one of which is removed under it: `python lose_a_node.py CONFIG.json OUT`.

It is a process of its own because the test session is already connected to another cluster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from malmen.config import Config
from malmen.platform import train as driver

sys.path.insert(0, str(Path(__file__).parent))
from chaos import waiting_loop

if __name__ == "__main__":
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    roles = {"lm": 2, "hypernet": 1}  # a node for the LM worker and one of the two actors, and a spare one
    lost = cluster.add_node(num_cpus=2, resources=roles)
    other = cluster.add_node(num_cpus=1, resources={"hypernet": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    removed = Path(sys.argv[2]).parent / "removed"
    driver.train_loop = waiting_loop(2, removed)  # its rank is in the middle of step 2 then

    def on_step(step: int, _report: Any) -> None:
        if step == 2 and not removed.exists():
            cluster.add_node(num_cpus=2, resources=roles)
            cluster.remove_node(lost, allow_graceful=False)
            removed.touch()

    trained = driver.train(config, sys.argv[2], listener=driver.Listener(step=on_step))
    assert trained.steps == config.training.steps
    ray.shutdown()
    cluster.shutdown()
