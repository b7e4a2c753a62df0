"""What cluster.yaml and platform/kuberay say, in words that tests can ask about."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator

from malmen.config import Config, load_config
from malmen.platform.cli.options import resolve_config

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "platform" / "kuberay"
SCHEMAS = ROOT / "tests" / "support" / "kuberay_schemas"
DOCKERFILE = KUBERAY / "Dockerfile"
FILES = (ROOT / "cluster.yaml", KUBERAY / "rayjob.yaml", KUBERAY / "rayservice.yaml", DOCKERFILE)

CLUSTER = yaml.safe_load(FILES[0].read_text(encoding="utf-8"))
JOB = yaml.safe_load(FILES[1].read_text(encoding="utf-8"))
SERVICE = yaml.safe_load(FILES[2].read_text(encoding="utf-8"))
JOB_CLUSTER, SERVICE_CLUSTER = JOB["spec"]["rayClusterSpec"], SERVICE["spec"]["rayClusterConfig"]
BOTH_CLUSTERS = pytest.mark.parametrize("cluster", [JOB_CLUSTER, SERVICE_CLUSTER], ids=["rayjob", "rayservice"])

# Parameters of EC2's RunInstances, which Ray hands on unread. IamInstanceProfile stands in a comment.
EC2_FIELDS = {"InstanceType", "ImageId", "BlockDeviceMappings", "IamInstanceProfile"}
# Maps whose keys are the writer's own names (or EC2's), not fields of a schema.
FREE_MAPS = {"resources", "rayStartParams", "file_mounts", "limits", "requests", "available_node_types", "node_config"}

Bundle = dict[str, float]
Where = tuple[Any, ...]


# --- reading the files ---


def ray_schema() -> dict[str, Any]:
    """The schema of `ray up`, found without importing ray; `provider` is open in it and closed here."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    schema["properties"]["provider"]["additionalProperties"] = False
    return schema


def kuberay_schema(kind: str) -> dict[str, Any]:
    parts = [json.loads((SCHEMAS / name).read_text(encoding="utf-8")) for name in ("ray.io_v1.json", "core_v1.json")]
    return {"$ref": f"#/$defs/{kind}", "$defs": parts[0]["$defs"] | parts[1]["$defs"]}


VALIDATORS = {
    "cluster": Draft7Validator(ray_schema()),
    "rayjob": Draft202012Validator(kuberay_schema("RayJob")),
    "rayservice": Draft202012Validator(kuberay_schema("RayService")),
}
DOCUMENTS = {"cluster": CLUSTER, "rayjob": JOB, "rayservice": SERVICE}


def problems(name: str, document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATORS[name].iter_errors(document)]


def fields(document: Any, where: Where = ()) -> Iterator[Where]:
    """The path of every field; names of one's own (a resource, a node type) are walked through but not listed."""
    if isinstance(document, dict) and where[-1:] != ("node_config",):
        free = where[-1:] and where[-1] in FREE_MAPS and document.keys() != {"requests", "limits"}
        for key, value in document.items():
            if not free:
                yield (*where, key)
            yield from fields(value, (*where, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from fields(value, (*where, index))


def misspelt(document: Any, where: Where) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[f"{where[-1]}s"] = inner.pop(where[-1])
    return changed


def commands(path: Path) -> list[list[str]]:
    """The commands in a file's leading comment, indented by three spaces there, as words."""
    leading = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert leading is not None
    lines = "".join(line[4:] for line in leading[0].splitlines(keepends=True) if line.startswith("#   "))
    return [shlex.split(line, comments=True) for line in lines.replace("\\\n", " ").splitlines()]


def start_commands() -> list[str]:
    return CLUSTER["head_start_ray_commands"] + CLUSTER["worker_start_ray_commands"]


def job_entrypoint() -> list[str]:
    (words,) = (words for words in commands(ROOT / "cluster.yaml") if words[:3] == ["ray", "job", "submit"])
    return words[words.index("--") + 1 :]


ENTRYPOINTS = {"cluster": job_entrypoint(), "rayjob": shlex.split(JOB["spec"]["entrypoint"])}
BOTH_ENTRYPOINTS = pytest.mark.parametrize("name", ENTRYPOINTS)


def settings(entrypoint: list[str]) -> Config:
    arguments = entrypoint[4 : entrypoint.index("--out")]
    return load_config(resolve_config(entrypoint[3]), arguments)


def node_types(name: str) -> dict[str, tuple[int, Bundle]]:
    """How many there may be of each type of node, and the Ray resources of one."""
    if name == "cluster":
        return {
            node: (spec.get("max_workers", 0), spec["resources"])
            for node, spec in CLUSTER["available_node_types"].items()
        }
    return {group["groupName"]: (group["maxReplicas"], group_resources(group)) for group in worker_groups(name)}


def worker_groups(name: str) -> list[dict[str, Any]]:
    cluster = JOB_CLUSTER if name == "rayjob" else SERVICE_CLUSTER
    return cluster["workerGroupSpecs"]


def group_resources(group: dict[str, Any]) -> Bundle:
    limits = ray_container(group)["resources"]["limits"]
    pod = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}
    return {key: value for key, value in pod.items() if value} | {k: float(v) for k, v in group["resources"].items()}


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def bundles(config: Config) -> list[Bundle]:
    """What Ray is asked for, one entry for each LM worker and each actor."""
    cluster = config.cluster
    assert cluster.lm_gpus is not None and cluster.hypernet_gpus is not None, "say how many GPUs: defaults look around"
    lm = {"CPU": cluster.lm_cpus, "GPU": cluster.lm_gpus, **cluster.lm_resources}
    hypernet = {"CPU": cluster.hypernet_cpus, "GPU": cluster.hypernet_gpus, **cluster.hypernet_resources}
    return [lm] * cluster.lm_workers + [hypernet] * cluster.hypernet_actors


def homeless(wanted: list[Bundle], nodes: list[Bundle]) -> list[Bundle]:
    """The bundles for which no node has room, first fit."""
    free, left = [dict(node) for node in nodes], []
    for bundle in wanted:
        for node in free:
            if all(node.get(key, 0) >= amount for key, amount in bundle.items()):
                for key in bundle:
                    node[key] = node.get(key, 0) - bundle[key]
                break
        else:
            left.append(bundle)
    return left
