"""Manifests: valid for every supported version of Kubernetes, as the golden files show them, and without secrets."""

from __future__ import annotations

import re

import pytest

from fake_kubernetes import VERSIONS, check_object, expanded
from kmatrix.engines.kubernetes.manifests import CONTAINER, LONGEST_BASE, base_name, manifests
from kmatrix.engines.kubernetes.scheduler import as_yaml
from kmatrix.engines.kubernetes.settings import read_settings
from kmatrix.errors import ConfigError
from kubernetes_factory import EVERYTHING, MATRIX, ONE_NODE, SETTINGS, TWO_NODES, made


@pytest.mark.parametrize("submission", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING], ids=["required settings", "all settings"])
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_for_each_version(submission, settings, version):
    for one in made(submission, **settings):
        check_object(one, version, lambda claim: claim == "results")


def test_runs_of_one_node_are_the_indexes_of_one_job(golden):
    golden("kubernetes_one_node.yaml", as_yaml(made(ONE_NODE)))


def test_a_run_over_several_nodes_has_a_job_and_the_submission_a_service(golden):
    golden("kubernetes_two_nodes.yaml", as_yaml(made(TWO_NODES, **EVERYTHING)))


RACK = "topology.example.org/rack"


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_of_a_run_prefer_nodes_that_are_close(version):
    (*_, job) = made(TWO_NODES, K8S_TOPOLOGY=RACK)
    check_object(job, version, lambda claim: claim == "results")
    affinity = job["spec"]["template"]["spec"]["affinity"]
    (term,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = job["spec"]["template"]["metadata"]["labels"]

    assert term["podAffinityTerm"]["topologyKey"] == RACK
    # Only the pods of the same run: others may be anywhere.
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    assert job["metadata"]["name"] in term["podAffinityTerm"]["labelSelector"]["matchLabels"].values()
    assert affinity["podAntiAffinity"]  # and still on hosts of their own


def test_kueue_places_the_pods_of_a_run_by_the_annotation():
    objects = made(TWO_NODES, K8S_TOPOLOGY=RACK, K8S_QUEUE="gpus")
    template = objects[-1]["spec"]["template"]

    assert template["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": RACK}
    assert "podAffinity" not in template["spec"]["affinity"]


@pytest.mark.parametrize("queue", ["", "gpus"])
def test_runs_of_one_node_have_no_topology(queue):
    (job,) = made(ONE_NODE, K8S_TOPOLOGY=RACK, K8S_QUEUE=queue)

    assert RACK not in as_yaml([job])


def test_no_value_of_a_secret_is_in_a_manifest(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")

    text = as_yaml(made(TWO_NODES, **EVERYTHING))

    assert "0123456789abcdef" not in text
    assert re.search(r"secretRef:\n +name: tracker-keys\n", text)


def test_only_the_head_of_a_run_has_a_name_that_others_need():
    for submission, settings, head in ((TWO_NODES, {}, "km-4f1a2b-0002-1-0.km-4f1a2b-0002"),):
        container = made(submission, **settings)[-1]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "KMATRIX_HEAD", "value": head} in container["env"]


@pytest.mark.parametrize("label", ["kmatrix:4f1a:0001", "A" * 80, "1abc", "km_4f", "", "ü"])
def test_names_are_legal_short_and_unique_for_any_label(label):
    name = base_name(label)

    assert len(name) <= LONGEST_BASE
    check_object({**made(ONE_NODE)[0], "metadata": {"name": f"{name}-99999"}}, VERSIONS[-1], lambda _: True)
    assert name != base_name(f"{label}x")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"K8S_IMAGE": ""}, "ENGINE=kubernetes needs K8S_IMAGE, the container image"),
        ({"K8S_CLAIM": "Results"}, "K8S_CLAIM=Results: expected lower-case letters"),
        ({"K8S_MOUNT": "results"}, "K8S_MOUNT=results: expected an absolute path"),
        ({"K8S_MOUNT": "/a/../b"}, "K8S_MOUNT=/a/../b: expected an absolute path"),
        ({"K8S_CODE": "/opt/kmatrix"}, "K8S_CODE=/opt/kmatrix is not below K8S_MOUNT"),
        ({"K8S_SUBPATH": "../x"}, "K8S_SUBPATH=../x: expected a folder of the claim"),
        ({"K8S_NODE_SELECTOR": "gpu=a b/c/d=1"}, "K8S_NODE_SELECTOR=gpu=a b/c/d=1: expected label=value"),
        ({"K8S_TOLERATIONS": "spot:Always"}, "K8S_TOLERATIONS=spot:Always: expected key"),
        ({"K8S_SHM": "16 GB"}, "K8S_SHM=16 GB: expected a size"),
        ({"K8S_USER": "root"}, "K8S_USER=root: expected numbers"),
        ({"K8S_NAMESPACE": "a" * 64}, f"K8S_NAMESPACE={'a' * 64}: expected lower-case"),
        ({"K8S_IMAGE": "x\ny"}, "K8S_IMAGE=x\ny: expected a name"),
        ({"K8S_TOPOLOGY": "a/b/c"}, "K8S_TOPOLOGY=a/b/c: expected a label of nodes"),
        ({"K8S_TTL": "soon"}, "K8S_TTL=soon: expected a duration"),
    ],
)
def test_a_setting_that_no_cluster_takes_is_refused(settings, problem):
    with pytest.raises(ConfigError) as raised:
        read_settings({**SETTINGS, **settings})
    assert raised.value.what.startswith(problem)


def test_a_planted_mistake_is_refused_by_the_checks_of_the_tests():
    """The schemas alone miss these: https://pypi.org/project/kubernetes-validate has no rules across fields."""
    for path, value in (
        (("spec", "template", "spec", "restartPolicy"), "Sometimes"),
        (("spec", "parallelism"), 9),
        (("metadata", "name"), "Not_Legal"),
        (("spec", "template", "spec", "volumes"), []),
    ):
        (job,) = made(ONE_NODE)
        place = job
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(Exception, match=r".+"):
            check_object(job, VERSIONS[-1], lambda _: True)


def test_the_container_is_the_one_that_the_rules_of_ends_name():
    for submission in (ONE_NODE, TWO_NODES):
        spec = made(submission)[-1]["spec"]
        (rule,) = [one["onExitCodes"] for one in spec["podFailurePolicy"]["rules"] if "onExitCodes" in one]
        assert rule["containerName"] == spec["template"]["spec"]["containers"][0]["name"] == CONTAINER


def test_a_path_with_a_dollar_reaches_the_pod_as_it_is():
    matrix = MATRIX.with_name("a$(KMATRIX_JOB)b$$c$d")
    (job,) = manifests(read_settings(SETTINGS), matrix, 1, ONE_NODE)
    container = job["spec"]["template"]["spec"]["containers"][0]
    variables = {"KMATRIX_JOB": "other"}
    assert str(matrix) in [expanded(word, variables) for word in container["command"]]
    values = [expanded(entry.get("value", ""), variables) for entry in container["env"]]
    assert f"{matrix}/jobs/0001" in values
