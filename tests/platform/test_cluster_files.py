"""cluster.yaml and platform/kuberay: no cluster is started, but every field, path, command and number is checked.

What a file names must exist; what it offers must be enough for the entrypoint it shows; a misspelt field must not pass.
"""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_documents import (
    BOTH_CLUSTERS,
    BOTH_ENTRYPOINTS,
    CLUSTER,
    DOCKERFILE,
    DOCUMENTS,
    EC2_FIELDS,
    ENTRYPOINTS,
    FILES,
    JOB,
    JOB_CLUSTER,
    ROOT,
    SCHEMAS,
    SERVICE,
    SERVICE_CLUSTER,
    bundles,
    commands,
    fields,
    groups,
    homeless,
    kuberay_schema,
    misspelt,
    node_types,
    problems,
    ray_container,
    settings,
    start_commands,
)

from malmen.platform.cli.options import resolve_config

# --- fields ---


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_fits_its_schema(name: str) -> None:
    assert problems(name, DOCUMENTS[name]) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_field_can_be_misspelt_unnoticed(name: str) -> None:
    paths = list(fields(DOCUMENTS[name]))
    assert len(paths) > 20
    passed = [where for where in paths if not problems(name, misspelt(DOCUMENTS[name], where))]
    assert passed == []


def test_the_schemas_refer_only_to_what_they_define() -> None:
    schema = kuberay_schema("RayJob")
    assert set(re.findall(r"#/\$defs/(\w+)", json.dumps(schema))) <= schema["$defs"].keys()


def test_the_nodes_of_cluster_yaml_are_described_in_words_that_ec2_knows() -> None:
    for spec in CLUSTER["available_node_types"].values():
        assert {"InstanceType", "ImageId"} <= spec["node_config"].keys() <= EC2_FIELDS
        (disk,) = spec["node_config"]["BlockDeviceMappings"]
        assert disk.keys() == {"DeviceName", "Ebs"} and disk["Ebs"].keys() == {"VolumeSize", "VolumeType"}


# --- what is named exists ---


@BOTH_ENTRYPOINTS
def test_an_entrypoint_runs_the_trainer_with_a_config_that_is_shipped(name: str) -> None:
    words = ENTRYPOINTS[name]
    assert words[:3] == ["python", "-m", "malmen.platform.train"]
    assert resolve_config(words[3]) == ROOT / "platform" / "configs" / f"{words[3]}.yaml"
    (out,) = words[words.index("--out") + 1 :]  # no `--resume`: it would refuse to start, and a retry needs none
    assert out.startswith(("s3://", "/"))


@BOTH_ENTRYPOINTS
def test_an_entrypoints_settings_are_settings(name: str) -> None:
    config = settings(ENTRYPOINTS[name])
    assert config.cluster.lm_workers > 1 < config.cluster.hypernet_actors


def test_two_shells_may_read_the_entrypoint_of_the_rayjob() -> None:
    assert re.fullmatch(r"[\w./:= -]+", JOB["spec"]["entrypoint"])


@pytest.mark.slow  # a fresh interpreter imports ray and torch
def test_the_trainer_has_the_options_of_the_entrypoints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "malmen.platform.train", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


def test_the_endpoint_of_the_rayservice_is_defined() -> None:
    (application,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert module == "malmen.serve.app"
    tree = ast.parse((ROOT / "serve" / "app.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_what_an_installation_needs_is_mounted_and_copied() -> None:
    """The folders of the package map and the files that pyproject.toml names; each exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    needed = folders | {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"}
    mounts = {remote: local for remote, local in CLUSTER["file_mounts"].items() if not local.startswith("~")}
    assert mounts == {f"/home/ubuntu/malmen/{name}": name for name in needed}
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name for line in copied for name in line.split()} == needed
    assert all((ROOT / name).exists() for name in needed)


def test_every_installation_is_held_to_the_constraints() -> None:
    installs = [line for line in CLUSTER["setup_commands"] if "pip install" in line]
    installs += [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if "pip install" in line]
    assert len(installs) == 2
    for line in installs:
        words = shlex.split(line)
        assert words[words.index("-c") + 1] == "constraints.txt"
        assert {".", ".[postgres]"} & set(words)


@BOTH_CLUSTERS
def test_the_ray_version_of_kuberay_files_is_the_installed_one(cluster: dict[str, Any]) -> None:
    assert cluster["rayVersion"] == importlib.metadata.version("ray")


@BOTH_CLUSTERS
def test_every_mount_has_its_volume_and_every_path_its_mount(cluster: dict[str, Any]) -> None:
    for group in groups(cluster):
        container = ray_container(group)
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        mounted = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
        paths = re.findall(r"(?:^|[= ])(/\S+)", JOB["spec"]["entrypoint"]) + [env["value"] for env in container["env"]]
        assert len(paths) == 5 and all(path.startswith(mounted) for path in paths)


@pytest.mark.parametrize("path", FILES[1:], ids=lambda path: path.name)
def test_the_files_that_commands_name_exist(path: Path) -> None:
    named = [word for words in commands(path) for word in words if word.startswith("platform/")]
    assert named and all((ROOT / name).is_file() for name in named)


@pytest.mark.slow  # imports ray's command line
def test_ray_has_every_command_and_option_that_the_files_use() -> None:
    import click
    from ray.scripts.scripts import cli

    parts = [shlex.split(part) for line in start_commands() for part in line.split(";")]
    started = [words for words in parts if words[0] == "ray"]
    shown = [words for words in commands(ROOT / "cluster.yaml") if words[0] == "ray"]
    assert len(started) == 4 and len(shown) == 7
    for words in started + shown:
        command, rest = cli, words[1:]
        while isinstance(command, click.Group):
            name = rest.pop(0)
            assert name in command.commands, words
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        rest = rest[: rest.index("--")] if "--" in rest else rest
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= options, words
        assert "cluster.yaml" in rest or words[1] in ("get-auth-token", "job", "start", "stop")
    options = {option for parameter in cli.commands["start"].params for option in parameter.opts}
    for group in groups(JOB_CLUSTER) + groups(SERVICE_CLUSTER):
        assert {f"--{flag}" for flag in group["rayStartParams"]} <= options


# --- what is offered is enough ---


@BOTH_ENTRYPOINTS
def test_the_nodes_have_room_for_the_entrypoint(name: str) -> None:
    wanted = bundles(settings(ENTRYPOINTS[name]))
    nodes = [resources for count, resources in node_types(name).values() for _ in range(count)]
    assert homeless(wanted, nodes) == []
    assert homeless(wanted, nodes[1:]) and homeless(wanted, nodes[:-1]), "no node is idle during the run"


@BOTH_ENTRYPOINTS
def test_custom_resources_send_every_worker_to_its_own_kind_of_node(name: str) -> None:
    types = node_types(name)
    for bundle in bundles(settings(ENTRYPOINTS[name])):
        able = [node for node, (_, resources) in types.items() if not homeless([bundle], [resources])]
        assert able == ["lm" if bundle["GPU"] else "hypernet"]


@BOTH_ENTRYPOINTS
def test_a_run_waits_until_a_node_can_have_come(name: str) -> None:
    """Nodes start at none: a GPU node boots and installs, or pulls an image of gigabytes."""
    assert settings(ENTRYPOINTS[name]).cluster.wait_seconds >= 1200


def test_the_limits_of_cluster_yaml_agree() -> None:
    assert CLUSTER["max_workers"] == sum(count for count, _ in node_types("cluster").values())
    assert CLUSTER["idle_timeout_minutes"] > 0
    for spec in CLUSTER["available_node_types"].values():
        assert spec.get("min_workers", 0) <= spec.get("max_workers", 0)


@BOTH_CLUSTERS
def test_kuberay_groups_scale_between_limits_and_ask_for_what_they_may_use(cluster: dict[str, Any]) -> None:
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["idleTimeoutSeconds"] > 0
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group.get("replicas", group["minReplicas"]) <= group["maxReplicas"] < 100
    for group in groups(cluster):
        asked = ray_container(group)["resources"]
        assert asked["requests"] == asked["limits"]  # Ray believes in the limits; less would be evicted
        assert {"cpu", "memory"} <= asked["limits"].keys() <= {"cpu", "memory", "nvidia.com/gpu"}
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert len(names) == len(set(names))


def test_a_finished_job_leaves_nothing_running() -> None:
    spec = JOB["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] <= 3600


# --- who may come in ---


def test_every_node_of_cluster_yaml_starts_ray_with_the_token() -> None:
    assert CLUSTER["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert CLUSTER["auth"]["ssh_user"] == "ubuntu"  # whose home that is
    starts = [line for line in start_commands() if "ray start" in line]
    assert len(starts) == 2
    for line in starts:
        parts = [part.strip() for part in line.split(";")]
        assert parts.index("export RAY_AUTH_MODE=token") < len(parts) - 1
        assert "unset OMP_NUM_THREADS" in parts and parts[-1].startswith("ray start ")


def test_the_dashboard_of_cluster_yaml_listens_on_loopback_only() -> None:
    (line,) = (line for line in start_commands() if "ray start --head" in line)
    assert re.findall(r"--dashboard-host=(\S+)", line) == ["127.0.0.1"]


@pytest.mark.parametrize("path", FILES[1:3], ids=lambda path: path.name)
def test_kuberay_takes_the_token_from_the_secret_that_the_first_command_makes(path: Path) -> None:
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    cluster = spec.get("rayClusterSpec") or spec["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    first = commands(path)[0]
    assert first[:5] == ["kubectl", "create", "secret", "generic", cluster["authOptions"]["secretName"]]
    assert first[5].startswith("--from-literal=auth_token=$(")


@BOTH_CLUSTERS
def test_no_container_is_root(cluster: dict[str, Any]) -> None:
    users = re.findall(r"^USER (.+)$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for group in groups(cluster):
        pod = group["template"]["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True and users == [str(pod["runAsUser"])] != ["0"]
        assert ray_container(group)["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_image_is_a_placeholder_and_the_same_everywhere() -> None:
    images = {ray_container(group)["image"] for group in groups(JOB_CLUSTER) + groups(SERVICE_CLUSTER)}
    assert images == {"your-registry/malmen:VERSION"}
    assert {words[words.index("-t") + 1] for words in commands(DOCKERFILE)} == images
    nodes = {spec["node_config"]["ImageId"] for spec in CLUSTER["available_node_types"].values()}
    assert len(nodes) == 1 and "YOUR" in nodes.pop()


@pytest.mark.parametrize("path", [*FILES, *SCHEMAS.iterdir()], ids=lambda path: path.name)
def test_no_file_holds_a_secret_or_names_a_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"AKIA\w+|ami-[0-9a-f]{8,}|PRIVATE KEY|\bhf_\w{20,}|arn:aws\S+", text) == []
    assert [word for word in re.findall(r"\b[\w+/]{32,}\b", text) if re.search(r"\d.*\d", word)] == (
        ["0a9eabde561ab59ab4bbe626072c359da9214484"] if path.name == "README.md" else []  # a commit of KubeRay's
    )
    assert set(re.findall(r"\w+://[\w.:-]+", text)) <= {
        "http://127.0.0.1:8265", "s3://your-bucket", "http://your-mlflow:5000", "psycopg://YOUR-DATABASE"
    }  # fmt: skip
    assert re.findall(r"index-url|trusted-host|\b[\w-]+\.(?:com|org|dev|net)\b", text) == (
        ["nvidia.com"] * text.count("nvidia.com/gpu")
    )


# --- what Ray itself makes of them ---


@pytest.mark.slow  # imports ray
def test_ray_up_accepts_cluster_yaml() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(CLUSTER))
    validate_config(prepared)
    assert {node: spec["max_workers"] for node, spec in prepared["available_node_types"].items()} == {
        node: count for node, (count, _) in node_types("cluster").items()
    }
    assert prepared["docker"] == {} and prepared["head_setup_commands"] == CLUSTER["setup_commands"]


@pytest.mark.slow  # imports ray
@pytest.mark.parametrize("name", ["rayjob", "rayservice"])
def test_rays_autoscaler_sees_the_same_nodes_in_the_kuberay_files(name: str) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = JOB_CLUSTER if name == "rayjob" else SERVICE_CLUSTER
    seen = _derive_autoscaling_config_from_ray_cr({"metadata": {"name": name, "namespace": "default"}, "spec": cluster})
    head, *workers = seen["available_node_types"].items()
    assert head[0] == "headgroup" and head[1]["resources"]["CPU"] == 0
    for spec in seen["available_node_types"].values():
        assert spec["resources"].pop("memory") >= 16 * 2**30
    assert {node: (spec["max_workers"], spec["resources"]) for node, spec in workers} == node_types(name)


@pytest.mark.slow  # imports ray serve
def test_serve_accepts_the_config_of_the_rayservice() -> None:
    from ray.serve.schema import ServeDeploySchema

    from malmen.serve.settings import parse_settings

    config = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    read = ServeDeploySchema.model_validate(config)  # which passes over fields that it does not know
    (application,) = read.applications
    both = [(read, config), (read.http_options, config["http_options"]), (application, config["applications"][0])]
    for model, given in both:
        assert given.keys() <= type(model).model_fields.keys()
    assert application.import_path == "malmen.serve.app:build"
    assert parse_settings(application.args, "args").reader.gpus == 1
    shipped = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "serve" / "endpoint.yaml").read_text()))
    assert parse_settings(shipped.applications[0].args, "args").store == "/shared/serve"
