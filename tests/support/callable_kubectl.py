"""A Kubernetes as one callable in place of subprocess.run: kubectl, whose Jobs and pods are a dict."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"


@dataclass
class FakeKubectl:
    """kubectl create, get and delete. Pods come and go as a test says."""

    items: dict[str, Object] = field(default_factory=dict)  # name -> Job or pod
    silent: str = ""  # "before": no answer, and nothing is done; "after": it is done, and the answer is lost
    stderr: str = ""  # of a refusal
    calls: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(words)
        verb = next(word for word in words[1:] if not word.startswith("--"))
        error, out = self.stderr, ""
        if self.silent != "before" and not error:
            out, error = getattr(self, f"do_{verb}")(words, options["input"])
        error = REFUSED if self.silent else error
        return subprocess.CompletedProcess(words, 1 if error else 0, "" if error else out, error)

    def do_create(self, words: Sequence[str], text: str) -> tuple[str, str]:
        path = _value(words, "--filename=")
        job = yaml.safe_load(text if path == "-" else Path(path).read_text(encoding="utf-8"))
        name = job["metadata"]["name"]
        if "--dry-run=server" in words:
            return "", ""
        if name in self.items:
            return "", f'Error from server (AlreadyExists): jobs.batch "{name}" already exists'
        self.items[name] = {**job, "status": {}}
        return f"job.batch/{name} created\n", ""

    def do_get(self, words: Sequence[str], _: str) -> tuple[str, str]:
        label = _value(words, "--selector=kmatrix=")
        found = [item for item in self.items.values() if item["metadata"]["labels"].get("kmatrix") == label]
        return json.dumps({"kind": "List", "items": found}), ""

    def do_delete(self, words: Sequence[str], _: str) -> tuple[str, str]:
        """Delete Jobs and their pods, as after the grace period."""
        for name in words:
            self.items.pop(name, None)
            for pod in [key for key in self.items if key.startswith(f"{name}/") and "--cascade=foreground" in words]:
                del self.items[pod]
        return "", ""

    def pod(self, job: str, index: int, phase: str = "Running", **status: Any) -> Object:
        """Add the newest pod of an index."""
        name, at = f"{job}/{index}/{len(self.items)}", f"2026-01-01T00:00:{len(self.items):02d}Z"
        labels = dict(self.items[job]["spec"]["template"]["metadata"]["labels"])
        labels |= {"batch.kubernetes.io/job-name": job, "batch.kubernetes.io/job-completion-index": str(index)}
        meta = {"name": f"{job}-{index}-x", "namespace": "ml", "labels": labels, "creationTimestamp": at}
        spec = {"nodeName": f"node-{index}" if phase != "Pending" else "", "containers": [{"name": "kmatrix"}]}
        self.items[name] = {"kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": phase, **status}}
        return self.items[name]


def _value(words: Sequence[str], flag: str) -> str:
    return next(word.removeprefix(flag) for word in words if word.startswith(flag))
