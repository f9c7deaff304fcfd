"""The settings of ENGINE=kubernetes, from the texts of the symbols K8S_*, and the values that they may have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kmatrix.errors import ConfigError
from kmatrix.records.jobs.forms import FORMS, USER, label_pairs, toleration, words

# Symbols whose texts have a form, which the Kconfig files name, too: they are checked there first, with file and line.
FORM_OF = {
    "K8S_NAMESPACE": "dns-label",
    "K8S_IMAGE": "image",
    "K8S_CLAIM": "dns-name",
    "K8S_MOUNT": "mount",
    "K8S_SUBPATH": "subpath",
    "K8S_CODE": "mount",
    "K8S_SECRET_NAME": "dns-name",
    "K8S_QUEUE": "dns-label",
    "K8S_TOPOLOGY": "label-key",
    "K8S_SHM": "quantity",
    "K8S_MEMORY": "quantity",
    "K8S_GPU_RESOURCE": "resource",
    "K8S_NODE_SELECTOR": "labels",
    "K8S_TOLERATIONS": "tolerations",
    "K8S_USER": "user",
}
BYTES = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the Jobs of a matrix are made. Empty: not set."""

    context: str = ""  # of the kubeconfig; "": the current one
    namespace: str = ""  # "": that of the context
    image: str = ""
    claim: str = ""  # PersistentVolumeClaim with the results and data
    mount: str = ""  # absolute path of the claim, the same in the pods as here
    subpath: str = ""  # folder of the claim that is mounted, "" for all of it
    code: str = ""  # a checkout on the claim that runs instead of the image's
    secret: str = ""  # whose keys become environment variables
    queue: str = ""  # LocalQueue of Kueue
    topology: str = ""  # key of a label: pods of a run prefer nodes with the same value
    autoscale: bool = False  # nodes are added on demand: those that are there now limit nothing
    shm: str = ""  # quantity: size of /dev/shm
    memory: str = ""  # quantity, per pod; "": that of the submission
    cpus: int = 0  # per pod; 0: those of the submission
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] | None = None
    tolerations: tuple[Mapping[str, str], ...] = ()
    user: int | None = None  # numeric user of the pods; None: that of the image
    group: int | None = None
    grace_s: int = 90  # from SIGTERM to SIGKILL
    restarts: int = 6  # of a pod that was killed
    parallel: int = 0  # pods of a Job at a time; 0: all
    ttl_s: int | None = None  # until an ended Job is deleted; None: never
    patch: Path | None = None  # strategic merge patch


def read_settings(texts: Mapping[str, str]) -> Settings:
    """Return the settings. texts: symbol -> value, as in engine.json. Raises ConfigError naming the first fault."""
    problem = next(problems(texts), None)
    if problem is not None:
        raise ConfigError(problem, hint="see docs/kubernetes.md, or `make menuconfig`, menu Kubernetes")
    user = USER.fullmatch(_text(texts, "K8S_USER") or "")
    patch = _text(texts, "K8S_PATCH")
    return Settings(
        context=_text(texts, "K8S_CONTEXT"),
        namespace=_text(texts, "K8S_NAMESPACE"),
        image=_text(texts, "K8S_IMAGE"),
        claim=_text(texts, "K8S_CLAIM"),
        mount=str(PurePosixPath(_text(texts, "K8S_MOUNT"))),
        subpath=_text(texts, "K8S_SUBPATH").strip("/"),
        code=_text(texts, "K8S_CODE"),
        secret=_text(texts, "K8S_SECRET_NAME"),
        queue=_text(texts, "K8S_QUEUE"),
        topology=_text(texts, "K8S_TOPOLOGY"),
        autoscale=_text(texts, "K8S_AUTOSCALE") == "y",
        shm=_text(texts, "K8S_SHM"),
        memory=_text(texts, "K8S_MEMORY"),
        cpus=int(_text(texts, "K8S_CPUS") or 0),
        gpu_resource=_text(texts, "K8S_GPU_RESOURCE") or "nvidia.com/gpu",
        node_selector=label_pairs(_text(texts, "K8S_NODE_SELECTOR")) or None,
        tolerations=tuple(toleration(word) for word in words(_text(texts, "K8S_TOLERATIONS"))),
        user=int(user[1]) if user else None,
        group=int(user[2]) if user and user[2] else None,
        grace_s=int(_text(texts, "K8S_GRACE") or 90),
        restarts=int(_text(texts, "K8S_RESTARTS") or 6),
        parallel=int(texts.get("PARALLEL_JOBS") or 0),
        ttl_s=seconds(_text(texts, "K8S_TTL")),
        patch=Path(patch) if patch else None,
    )


def problems(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the settings, one sentence each. texts: symbol -> value."""
    for name, what in (
        ("K8S_IMAGE", "container image"),
        ("K8S_CLAIM", "PersistentVolumeClaim"),
        ("K8S_MOUNT", "path of the claim"),
    ):
        if not _text(texts, name):
            yield f"ENGINE=kubernetes needs {name}, the {what}"
    for name, form in FORM_OF.items():
        text = _text(texts, name)
        if text and (why := FORMS[form](text)):
            yield f"{name}={text}: {why}"
    mount, code = _text(texts, "K8S_MOUNT"), _text(texts, "K8S_CODE")
    if mount and code and not is_below(code, mount):
        yield f"K8S_CODE={code} is not below K8S_MOUNT={mount}: pods see only the claim"
    ttl = _text(texts, "K8S_TTL")
    if ttl and seconds(ttl) is None:
        yield f"K8S_TTL={ttl}: expected a duration such as 90m, 12h or 7d"


def seconds(text: str) -> int | None:
    """Return a duration in whole seconds, None for "" or an invalid one. The Kconfig files check its form, too."""
    total, rest = 0.0, text
    while match := re.match(r"([0-9]+(?:\.[0-9]+)?)([dhms]?)", rest):
        total, rest = total + float(match[1]) * SECONDS[match[2]], rest[match.end() :]
    return round(total) if text and not rest and total else None


def mib(quantity: str) -> int | None:
    """Return a quantity of bytes in MiB, None for "" or an unknown form."""
    match = re.fullmatch(r"([0-9]+)(m|[KMGT]i|[kMGT])?", quantity, re.ASCII)
    if match is None:
        return None
    count = int(match[1])
    return count // 1000 // 2**20 if match[2] == "m" else count * BYTES[match[2] or ""] // 2**20


def is_below(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path is a folder, or below it, by its text."""
    return PurePosixPath(path).is_relative_to(PurePosixPath(folder))


def _text(texts: Mapping[str, str], name: str) -> str:
    return (texts.get(name) or "").strip()
