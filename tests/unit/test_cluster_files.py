"""Cluster files: broken variants of the shipped ones, each with its one
finding or its refusal.
"""

import pytest

from cluster.__main__ import main
from cluster.files.ray_up import load_cluster
from cluster.files.rules import findings
from tests.specs import REPOSITORY, error_of
from tests.unit.cluster_files import (
    HEAD,
    LOCAL,
    TYPES,
    WORKER,
    broken,
    drop,
    in_the_repository,  # noqa: F401 (used by every test)
    put,
    remarks,
    replace,
    shipped,
    write,
)
from trainers.errors import ConfigError

SPOT = f"{TYPES}.gpu_spot"
CONSTRAINTS = "~/paceline-src/constraints.txt"
PORTS = "provider.security_group.IpPermissions"


def opened(port, addresses):
    entry = {
        "FromPort": port,
        "ToPort": port,
        "IpProtocol": "tcp",
        "IpRanges": [{"CidrIp": addresses}],
    }
    return put(
        "provider.security_group", {"GroupName": "g", "IpPermissions": [entry]}
    )


def unmounted(place):
    return lambda tree: tree["file_mounts"].pop(place)


def unsaid(field):
    return lambda tree: tree["provider"].pop(field)


def unpinned(old, new):
    """What is installed changed, without the file of constraints."""

    def change(tree):
        replace("setup_commands", f"-c {CONSTRAINTS} ")(tree)
        replace("setup_commands", old, new)(tree)

    return change


def in_docker(image, *options):
    return put(
        "docker",
        {"image": image, "container_name": "r", "run_options": [*options]},
    )


def with_the_images_ray(change):
    """Without the command that installs Ray."""
    return lambda tree: [drop("setup_commands.3")(tree), change(tree)]


def everywhere(old, new):
    return lambda tree: [
        replace(field, old, new)(tree) for field in (HEAD, WORKER)
    ]


def at(name, field, value, level):
    """A change of a field, which is what the finding names."""
    return name, put(field, value), level, field


# The file, the change, and the level and field of what is found.
FOUND = {
    "token_off": (
        "aws",
        replace(WORKER, "MODE=token", "MODE=disabled"),
        "error",
        WORKER,
    ),
    "no_token": (
        "azure",
        replace(WORKER, "export RAY_AUTH_MODE=token;"),
        "error",
        WORKER,
    ),
    "token_in_the_file": (
        "aws",
        replace(HEAD, "export RAY_AUTH", "RAY_AUTH_TOKEN=a export RAY_AUTH"),
        "error",
        "the file",
    ),
    "key_of_another_service": (
        "gcp",
        replace(WORKER, "export ", "export W_KEY='01234567' "),
        "error",
        "the file",
    ),
    "token_after_a_quote_and_a_line": (
        "aws",
        put("worker_setup_commands", ["echo \"\"\nX=$X hf_token='hf_abcde'"]),
        "error",
        "the file",
    ),
    "token_for_docker": (
        "aws",
        in_docker("me/own:1", "-eRAY_AUTH_TOKEN=a", "-p 8265:8265"),
        "error",
        "the file",
    ),
    "token_stays_at_home": (
        "aws",
        unmounted("~/.ray/auth_token"),
        "error",
        "file_mounts",
    ),
    "open_dashboard": (
        "onprem",
        replace(HEAD, "host=127.0.0.1", "host=0.0.0.0"),
        "warning",
        HEAD,
    ),
    "open_port": ("aws", opened(8265, "0.0.0.0/0"), "error", PORTS),
    "cloud_key": (
        "aws",
        put("setup_commands", ["x AKIAABCDEFGHIJKLMNOP"]),
        "error",
        "the file",
    ),
    "password": (
        "azure",
        put("rsync_filter", ["https://me:hunter2@x.org"]),
        "error",
        "the file",
    ),
    "ray_older": (
        "gcp",
        replace("setup_commands", "==2.60.0", "==2.55.0"),
        "error",
        "setup_commands",
    ),
    "torch_older": (
        "aws",
        replace("setup_commands", "torch==2.15.0", "torch==2.11.0"),
        "warning",
        "setup_commands",
    ),
    "ray_not_pinned": (
        "aws",
        unpinned("tune]==2.60.0", "tune]"),
        "warning",
        "setup_commands",
    ),
    "ray_older_in_an_image": (
        "aws",
        with_the_images_ray(in_docker("rayproject/ray:2.9.0-py310-gpu")),
        "error",
        "docker",
    ),
    "image_not_pinned": (
        "aws",
        put(f"{SPOT}.docker", {"worker_image": "rayproject/ray-ml:latest"}),
        "warning",
        "docker",
    ),
    "ray_older_in_a_type": at(
        "aws",
        f"{SPOT}.worker_setup_commands",
        ["pip install \\\n  ray==2.1.0"],
        "error",
    ),
    "more_gpus": at("azure", f"{SPOT}.resources.GPU", 4, "error"),
    "more_cpus": at("azure", f"{SPOT}.resources.CPU", 32, "error"),
    "idle_gpus": at("aws", f"{SPOT}.resources.GPU", 0, "warning"),
    "head_works": at("gcp", f"{TYPES}.head.resources.CPU", 8, "warning"),
    "no_profile": (
        "aws",
        drop(f"{SPOT}.node_config.IamInstanceProfile"),
        "warning",
        f"{SPOT}.node_config.IamInstanceProfile",
    ),
    "misspelt_field": at(
        "azure", f"{SPOT}.node_config.azure_arm_tag", {}, "warning"
    ),
    "no_identity": (
        "azure",
        drop("provider.msi_name"),
        "warning",
        "provider.msi_name",
    ),
    "no_storage": (
        "azure",
        replace(HEAD, "export PACELINE_STORAGE=", "echo "),
        "warning",
        HEAD,
    ),
    "two_storages": (
        "onprem",
        replace(WORKER, "=/nfs/paceline", "=/nfs2"),
        "error",
        WORKER,
    ),
    "own_disk": ("gcp", everywhere("gs://MY-BUCKET", "/tmp"), "error", HEAD),
    "home": ("gcp", everywhere("gs://MY-BUCKET", "${HOME}"), "error", HEAD),
    "relative_storage": (
        "aws",
        everywhere("s3://MY-BUCKET/", ""),
        "error",
        HEAD,
    ),
    "scheme_misspelt": ("aws", everywhere("s3://", "s3:/"), "error", HEAD),
    "no_autoscaler": (
        "aws",
        replace(HEAD, "--autoscaling-config=~/ray_bootstrap_config.yaml"),
        "error",
        HEAD,
    ),
    "no_autoscaler_beside_ray": (
        "aws",
        replace(HEAD, "paceline-cluster autoscale", "true"),
        "error",
        HEAD,
    ),
    "resource_in_small_letters": (
        "aws",
        put(f"{SPOT}.resources", {"CPU": 8, "GPU": 1, "gpu": 1}),
        "warning",
        f"{SPOT}.resources.gpu",
    ),
    "autoscaler_v2": (
        "onprem",
        replace(HEAD, "export RAY_enable_autoscaler_v2=0;"),
        "warning",
        "provider.type",
    ),
}


@pytest.mark.parametrize(
    ("name", "change", "level", "field"), FOUND.values(), ids=FOUND
)
def test_found(name, change, level, field, tmp_path, capsys):
    file = broken(name, change, tmp_path)
    assert remarks(file) == [(level, field)]
    assert main(["validate", file]) == (2 if level == "error" else 0)
    assert main(["validate", file, "--strict"]) == (
        2 if level == "error" else 1
    )
    assert "***" not in capsys.readouterr().err, (
        "no finding is hidden as a secret"
    )


IN_ORDER = {
    "local_build": replace(
        "setup_commands", "torch==2.15.0", "torch==2.15.0+cu130"
    ),
    "other_packages": put(
        "worker_setup_commands",
        ["pip install torchvision ray_lightning raytune-x"],
    ),
    "no_install": put(
        "worker_setup_commands", ["echo ray torch==1.0", "ray stop"]
    ),
    "unknown_machine": put(f"{SPOT}.node_config.InstanceType", "z9.huge"),
    "detected": put(f"{SPOT}.resources", {}),
    "localhost": replace(HEAD, "host=127.0.0.1", "host=localhost"),
    "ssh_for_everybody": opened(22, "0.0.0.0/0"),
    "image_with_another_ray_below": in_docker("rayproject/ray:2.9.0"),
    "image_of_the_same_ray": with_the_images_ray(
        in_docker("rayproject/ray:2.60.0-py312-gpu")
    ),
    "image_by_its_digest": in_docker("rayproject/ray@sha256:0123"),
    "no_secrets": put(
        "worker_setup_commands",
        [
            "A_KEY=\nB_TOKEN=\"$(cat '/token/of b')\" C_KEY=~/.ssh/c.pem",
            "gpgkey=https://x.org/key create-tags Key=Environment,Value=x",
        ],
    ),
    "host_after_a_backslash": replace(
        HEAD, "host=127.0.0.1", "host \\\n127.0.0.1"
    ),
}


@pytest.mark.parametrize("change", IN_ORDER.values(), ids=IN_ORDER)
def test_in_order(change, tmp_path):
    assert remarks(broken("aws", change, tmp_path)) == []


def test_settings_in_a_profile_count_and_those_of_another_command_do_not(
    tmp_path,
):
    storage = "export PACELINE_STORAGE=s3://MY-BUCKET/paceline;"
    tree = shipped("aws")
    replace(HEAD, storage)(tree)
    tree[HEAD].insert(1, storage)
    assert remarks(write(tmp_path, tree)) == [("warning", HEAD)]
    tree["head_setup_commands"].append(f"echo '{storage}' >> ~/.bashrc")
    assert remarks(write(tmp_path, tree)) == []


def test_rays_defaults_are_remarked_on(tmp_path):
    """Ray's own commands: an open dashboard, no token, a wheel from a branch, ..."""
    found = remarks(
        write(
            tmp_path,
            {
                "cluster_name": "a",
                "provider": {"type": "aws", "region": "us-east-1"},
            },
        )
    )
    assert {
        ("error", HEAD),
        ("error", WORKER),
        ("warning", HEAD),
        ("warning", "setup_commands"),
    } <= set(found)


# The file, the change, the field, and a word of the fix.
REFUSED = {
    "typo": (
        "aws",
        put("setup_comands", []),
        "setup_comands",
        "`setup_commands`",
    ),
    "typo_in_a_type": (
        "aws",
        put(f"{SPOT}.min_worker", 1),
        f"{SPOT}.min_worker",
        "`min_workers`",
    ),
    "provider_unknown": (
        "aws",
        put("provider.type", "amazon"),
        "provider.type",
        "",
    ),
    "kuberay": ("aws", put("provider.type", "kuberay"), "provider.type", ""),
    "min_above_max": ("aws", put(f"{SPOT}.min_workers", 9), "the file", ""),
    "head_typo": ("aws", put("head_node_type", "haed"), "the file", ""),
    "no_head": ("aws", drop("head_node_type"), "the file", ""),
    "no_region": ("aws", unsaid("region"), "provider", ""),
    "no_project": ("gcp", unsaid("project_id"), "provider", ""),
    "no_resource_group": ("azure", unsaid("resource_group"), "provider", ""),
    "half_a_gpu": (
        "aws",
        put(f"{SPOT}.resources.GPU", 0.5),
        f"{SPOT}.resources.GPU",
        "",
    ),
    "no_resources": ("aws", drop(f"{SPOT}.resources"), SPOT, ""),
    "no_head_ip": ("onprem", drop("provider.head_ip"), "provider", ""),
}


@pytest.mark.parametrize(
    ("name", "change", "field", "fix"), REFUSED.values(), ids=REFUSED
)
def test_refused(name, change, field, fix, tmp_path):
    file = broken(name, change, tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_cluster(file)
    assert (caught.value.field, caught.value.source) == (field, file)
    assert caught.value.rule
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("a: [", "line 1, column 5"),
        ("- 1\n", "the file"),
        ("", "the file"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4"),
        ("cluster_name: a\n---\ncluster_name: b\n", "the file"),
        ("kind: RayCluster\n", "the file"),
        ("#!/bin/bash\n#SBATCH --nodes=2\nset -e\n", "the file"),
    ],
)
def test_what_is_no_cluster_file(text, field, tmp_path):
    with error_of(field):
        load_cluster(write(tmp_path, text))


def test_a_cluster_file_that_is_not_there_has_a_near_miss(tmp_path):
    (tmp_path / "cluster.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"is not there; did you mean .*/cluster\.ya"
    ):
        load_cluster(tmp_path / "clutser.yaml")


def test_hosts_are_workers_and_the_environment_may_turn_autoscaler_v2_off(
    tmp_path,
):
    cluster = load_cluster(write(tmp_path, LOCAL))
    assert [
        (node_type.min_workers, node_type.max_workers)
        for node_type in cluster.node_types
    ] == [(0, 0), (2, 2)]
    assert findings(cluster, {"RAY_UP_enable_autoscaler_v2": "0"}) == []


def test_each_file_is_judged_by_itself_and_no_key_is_shown(tmp_path, capsys):
    file = broken(
        "aws", put("setup_commands", ["x AKIAABCDEFGHIJKLMNOP"]), tmp_path
    )
    good = str(REPOSITORY / "cluster" / "gcp.yaml")
    assert main(["validate", file, good]) == 2
    out, err = capsys.readouterr()
    assert out == f"{good}: in order (gcp, up to 8 worker nodes)\n"
    assert err.startswith(f"error: {file}: `the file`")
    assert "AKIA" not in err
