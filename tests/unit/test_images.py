"""The image, the Kubernetes job and the SkyPilot task: pinned, and of the forms that are expected.

Neither is built or submitted here. The schemas hold the fields that are used, after Kubeflow's CRD
(kubeflow.org/v1) and SkyPilot's YAML reference, and refuse others, so a misspelt one is found.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from megappo.doctor import image

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).parent / "schemas"


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [re.split(r"==", line) for line in lines if line and not line.startswith("#")]
    assert all(len(parts) == 2 for parts in found), f"{name} has a line without =="
    return {normal(package.split("[")[0]): version for package, version in found}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def instructions():
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


def test_the_image_is_pinned_and_ends_as_an_ordinary_user():
    steps = instructions()
    known = {"FROM", "SHELL", "ENV", "WORKDIR", "COPY", "RUN", "USER", "CMD"}
    assert {name for name, _ in steps} == known
    (base,) = [value for name, value in steps if name == "FROM"]
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)
    users = [value for name, value in steps if name == "USER"]
    assert users == ["megappo"]
    checked = [n for n, (name, v) in enumerate(steps) if name == "RUN" and "doctor.image" in v]
    assert len(checked) == 1
    assert checked[0] > max(n for n, (name, _) in enumerate(steps) if name == "COPY")
    for name, value in steps:
        if name == "RUN" and "pip install" in value:
            assert re.search(r"-r \S+\.txt|-e \.", value), f"unpinned: {value}"
            for call in re.findall(r"pip install [^&]*", value):
                assert re.search(r"--no-deps|-c \S+\.txt", call), f"dependencies float: {call}"


def test_the_images_packages_and_what_they_need_are_pinned_but_for_its_own_torch(tmp_path):
    """The filters of the Dockerfile itself, on the files that it copies."""
    (step,) = [v for name, v in instructions() if name == "RUN" and "constraints.txt" in v]
    filters = re.findall(r"(?:^|&&) *(grep [^&]*)", step)
    assert len(filters) == 2
    for command in filters:
        command = command.replace("/tmp/", f"{tmp_path}/")
        subprocess.run(["bash", "-c", command], cwd=ROOT, check=True)
    packages = {line.split("==")[0] for line in lines_of(tmp_path / "packages.txt")}
    constraints = {line.split("==")[0] for line in lines_of(tmp_path / "constraints.txt")}
    for own in ("torch", "torchvision", "triton", "numpy"):
        assert own not in packages | constraints
    assert {"transformers", "megatron-core", "wandb", "mlflow-skinny"} <= packages
    assert {"tokenizers", "pydantic", "databricks-sdk"} <= constraints


def lines_of(path):
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_what_the_image_copies_is_there_and_not_ignored():
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name, value in instructions():
        if name == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in allowed, source


def test_pins_of_all_set_ups_agree():
    files = ("cpu.txt", "cpu-nodeps.txt", "gpu.txt", "gpu-sglang.txt")
    seen: dict[str, str] = {}
    for file in files:
        for package, version in pins(file).items():
            assert seen.setdefault(package, version) == version, (file, package)


def test_kernels_have_the_versions_that_sglang_asks_for():
    asked = {}
    for line in importlib.metadata.requires("sglang"):
        found = re.match(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)$", line.split(";")[0].strip())
        if found and "extra" not in line:
            asked[normal(found[1])] = found[2]
    ours = pins("gpu-sglang.txt")
    shared = ours.keys() & asked.keys()
    assert {"sglang-kernel", "flashinfer-python", "xgrammar"} <= shared
    assert {name: ours[name] for name in shared} == {name: asked[name] for name in shared}


def test_the_versions_that_the_doctor_wants_are_those_that_are_pinned():
    ours = pins("gpu.txt") | pins("gpu-sglang.txt")
    assert ours["sglang"] == image.TESTED_SGLANG
    assert ours["sglang-kernel"] == image.SGLANG_KERNEL
    assert image.fits(ours["transformer-engine"])
    low, high = image.TRANSFORMER_ENGINE
    words = f"it must be {low[0]}.{low[1]} or later and under {high[0]}.{high[1]}"
    assert words == image.RULE_OF_ENGINE


def test_the_images_check_names_what_a_cpu_machine_lacks():
    result = subprocess.run(
        [sys.executable, "-m", "megappo.doctor.image"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "transformer_engine.pytorch cannot be imported" in result.stdout
    assert "sgl_kernel cannot be imported" in result.stdout
    assert "apex is not NVIDIA's, or missing" in result.stdout
    assert "megatron-core" not in result.stdout


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        *(("2.8.0", False), ("2.9", True), ("2.10.0+abc", True), ("2.12.0", False), ("3.0", False)),
        *(("2", False), ("unknown", False)),
    ],
)
def test_versions_of_transformer_engine(version, expected):
    assert image.fits(version) is expected


@pytest.mark.parametrize(
    ("file", "schema"),
    [("k8s/pytorchjob.yaml", "pytorchjob.json"), ("skypilot.yaml", "skypilot.json")],
)
def test_manifests_fit_their_schemas(file, schema):
    rules = json.loads((SCHEMAS / schema).read_text())
    jsonschema.Draft202012Validator.check_schema(rules)
    content = yaml.safe_load((ROOT / "launch" / file).read_text())
    jsonschema.validate(content, rules)
    content["spce"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, rules)


def test_the_job_has_shared_memory_and_as_many_nodes_as_it_says():
    job = yaml.safe_load((ROOT / "launch" / "k8s" / "pytorchjob.yaml").read_text())
    specs = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(spec["replicas"] for spec in specs.values())
    for spec in specs.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        assert int(variables["NNODES"]) == nodes
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert int(variables["GPUS_PER_NODE"]) == gpus
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert mounts["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        check_shell(container["args"][0])
        # The name of the service that the operator makes for the first pod.
        assert f" MASTER_ADDR={job['metadata']['name']}-master-0 " in container["args"][0]


def test_the_task_is_a_script_and_its_config_is_there():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert (ROOT / task["envs"]["CONFIG"]).exists()
    check_shell(task["run"])


def test_the_tasks_nodes_share_a_disk_and_its_container_is_not_the_ordinary_users():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    (mount,) = task["volumes"]
    assert task["envs"]["RUN_DIR"].startswith(f"{mount}/")
    assert f"cd {mount} " in task["run"]  # where models/ and data/ of the config are
    assert task["resources"]["infra"] == "k8s"  # has such volumes
    assert task["resources"]["image_id"].endswith(":root")
    assert "workdir" not in task  # the image's own copy runs, as its packages are


def check_shell(script):
    result = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "launch/node.sh" in script
    for config in re.findall(r"configs/\S+\.yaml", script):
        assert (ROOT / config).exists()


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (3, 3), (75, 175)])
def test_the_job_restarts_a_pod_for_a_run_that_can_go_on_alone(tmp_path, code, expected):
    job = yaml.safe_load((ROOT / "launch" / "k8s" / "pytorchjob.yaml").read_text())
    master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "node.sh").write_text(f'test "$NODE_RANK" = 1 || exit 9\nexit {code}\n')
    script = master["args"][0].replace("/opt/megappo", str(tmp_path))
    result = subprocess.run(
        ["bash", "-c", script], env={"RANK": "1", "PATH": "/usr/bin:/bin"}, timeout=30, check=False
    )
    assert result.returncode == expected
