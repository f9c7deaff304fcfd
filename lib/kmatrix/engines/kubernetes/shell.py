"""A shell in a small pod that mounts the claim of a matrix, by `kubectl exec`; the pod is deleted afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from kmatrix.engines.kubernetes.api import Api
from kmatrix.engines.kubernetes.manifests import APPLICATION, CONTAINER, Object
from kmatrix.engines.kubernetes.patch import patched
from kmatrix.engines.kubernetes.settings import Settings
from kmatrix.engines.kubernetes.views import waiting_reason
from kmatrix.errors import LaunchError

LOOK_S = 1.0  # between two looks at the pod
START_S = 600.0  # an image may take minutes
LOGIN = "bash"  # the user types there; no text of ours is given to it
LONGEST_S = 12 * 3600  # a pod whose deletion was forgotten ends by itself


def shell_pod(settings: Settings, name: str) -> Object:
    """Return a pod that does nothing but mount the claim, without GPUs."""
    place = {"namespace": settings.namespace} if settings.namespace else {}
    mount: Object = {"name": "results", "mountPath": settings.mount}
    mount |= {"subPath": settings.subpath} if settings.subpath else {}
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    security |= {} if settings.user == 0 else {"runAsNonRoot": True}  # as of the pods that train
    security |= {} if settings.user is None else {"runAsUser": settings.user}
    security |= {} if settings.group is None else {"runAsGroup": settings.group}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **place, "labels": dict(APPLICATION)},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LONGEST_S,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": security,
            "containers": [
                {
                    "name": CONTAINER,
                    "image": settings.image,
                    "command": ["sleep", str(LONGEST_S)],
                    "workingDir": settings.mount,
                    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [mount],
                }
            ],
            "volumes": [{"name": "results", "persistentVolumeClaim": {"claimName": settings.claim}}],
        },
    }


def run_shell(
    settings: Settings, api: Api, command: Sequence[str] = (LOGIN,), *, say: Callable[[str], object] = print
) -> int:
    """Run a command with a terminal in a new pod, and return its exit status. The pod is deleted in any case.

    Raises LaunchError if kubectl is not installed, or the pod does not start, and ConfigError for a bad K8S_PATCH.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise LaunchError(
            "kubectl not found", why="it connects the terminal", hint="install it, of your cluster's version"
        )
    name = f"kmatrix-shell-{os.urandom(4).hex()}"
    pod = shell_pod(settings, name)
    api.create(patched([pod], settings.patch)[0] if settings.patch else pod)
    try:
        _wait(api, name, say)
        words = [kubectl, *(["--context", settings.context] if settings.context else []), "--namespace", api.place]
        return subprocess.run([*words, "exec", "-it", name, "--", *command], check=False).returncode
    finally:
        api.delete("Pod", name)
        say(f"deleted the pod {name}")


def _wait(api: Api, name: str, say: Callable[[str], object]) -> None:
    """Wait until a pod runs. Raises LaunchError with its reason after a while, or if it ended."""
    deadline, said = time.monotonic() + START_S, ""
    while True:
        pod = api.read("Pod", name) or {}
        phase, reason = (pod.get("status") or {}).get("phase"), waiting_reason(pod)
        if phase == "Running":
            return
        if phase in ("Succeeded", "Failed") or not pod or time.monotonic() > deadline:
            raise LaunchError(f"the pod {name} does not start", why=reason or f"it is {phase or 'gone'}")
        if reason and reason != said:
            said = reason
            say(f"pod {name}: {reason}")
        time.sleep(LOOK_S)
