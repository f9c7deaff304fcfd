"""Settings of Kubernetes: checked when the configuration is read, by the rules that the manifests are made with."""

from __future__ import annotations

import kconfiglib as kc
import pytest

from kmatrix.engines.kubernetes.settings import FORM_OF
from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import load_config
from kmatrix.kconfig.tree import Tree
from kmatrix.records.jobs.forms import FORMS
from programs import ROOT

FREE = {"K8S_CONTEXT", "K8S_PATCH"}  # any name of a kubeconfig, and any file


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree.parse(srctree=ROOT)


def test_every_text_has_the_form_that_the_manifests_are_checked_with(tree):
    texts = {one.name for one in tree.symbols if one.name.startswith("K8S_") and one.orig_type == kc.STRING}

    assert {name: form for name, form in tree.forms.items() if name.startswith("K8S_")} == FORM_OF
    assert texts - FORM_OF.keys() - FREE <= tree.durations


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("K8S_MEMORY", "64GB", "expected a size such as 64Gi"),
        ("K8S_GPU_RESOURCE", "nvidia gpu", "expected a resource name such as nvidia.com/gpu"),
        ("K8S_NODE_SELECTOR", "zone=a disk/x/y=1", "expected label=value, not disk/x/y=1"),
        ("K8S_TOLERATIONS", "spot=true:Always", "expected key[=value][:effect], effect one of NoSchedule"),
        ("K8S_MOUNT", "results", "expected an absolute path, such as /mnt/results"),
        ("K8S_USER", "me", "expected numbers: <user> or <user>:<group>"),
    ],
)
def test_an_invalid_value_is_refused_with_its_line(tree, tmp_path, name, text, why):
    path = tmp_path / ".config"
    path.write_text(f'# a comment\nCONFIG_{name}="{text}"\n', encoding="utf-8")

    with pytest.raises(ConfigError) as refused:
        load_config(tree, path)

    assert f"{path}:2" in str(refused.value)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("labels", "nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB, zone="),
        ("tolerations", "spot=true:NoSchedule maintenance"),
        ("user", "1000:100"),
        ("quantity", "512Mi"),
        ("image", "registry.example.org:5000/team/kmatrix@sha256:0123abcd"),
    ],
)
def test_a_legal_value_has_its_form(form, text):
    assert not FORMS[form](text)
