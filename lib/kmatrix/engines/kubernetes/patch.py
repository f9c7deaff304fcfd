"""Changes that a user makes to manifests: a strategic merge patch, with the merge keys of the Kubernetes API.

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kmatrix.engines.kubernetes.manifests import CONTAINER, Object
from kmatrix.errors import ConfigError
from kmatrix.redaction.redactor import is_key_name, keys_in

# The key by which elements of a list are the same, by the name of the list. Lists without one are replaced.
# https://github.com/kubernetes/api (patchMergeKey): core/v1/types.go.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
PORT_KEYS = ("containerPort", "port")  # of containers and of Services; the port decides, not the protocol
KINDS = ("Job", "Service")
DIRECTIVE = "$patch"
HINT = "docs/kubernetes.md, K8S_PATCH, has examples"


def patched(objects: Sequence[Object], path: Path) -> list[Object]:
    """Return the objects with the changes of a file applied: each of its documents changes the objects of its kind.

    Raises ConfigError with file and line.
    """
    documents = _load(path)
    found = [copy.deepcopy(one) for one in objects]
    for document in documents:
        kind = document.get("kind")
        if kind not in KINDS:
            raise _error(path, document, f"kind is {kind!r}", f"expected one of {', '.join(KINDS)}")
        for index, one in enumerate(found):
            if one["kind"] == kind:
                changed = _merged(one, {k: v for k, v in document.items() if k not in ("apiVersion", "kind")}, path)
                _check(path, document, one, changed)
                found[index] = changed
    return found


class _Lined(dict[str, Any]):
    """A mapping of the file, with its first line."""

    line = 0


def _load(path: Path) -> list[_Lined]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def construct(loader: Any, node: Any) -> _Lined:
        loader.flatten_mapping(node)
        pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
        seen: set[str] = set()
        for (name, _), (key, _) in zip(pairs, node.value, strict=True):
            where = f"{path}:{key.start_mark.line + 1}"
            if not isinstance(name, str):
                raise ConfigError(f"{where}: {name!r} is not a text", hint="put it in quotes")
            if name in seen:
                raise ConfigError(f"{where}: {name} is there twice")
            seen.add(name)
        found = _Lined({name: loader.construct_object(value, deep=True) for name, value in pairs})
        found.line = node.start_mark.line + 1
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", construct)
    try:
        text = path.read_text(encoding="utf-8")
        documents = list(yaml.load_all(text, Loader))  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"K8S_PATCH={path} cannot be read", why=error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"K8S_PATCH={path} is not a text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML", why=getattr(error, "problem", None) or "", hint=HINT) from None
    for number, document in enumerate(documents):
        if document is not None and not isinstance(document, _Lined):
            raise ConfigError(f"{path}: document {number + 1} is not a mapping", hint=HINT)
    # Job manifests are stored with the results, and anybody who may read Jobs sees them.
    if found := keys_in(text):
        raise ConfigError(
            f"{path} contains a key: {found[0]}", hint="put it in a Secret, and name that in K8S_SECRET_NAME"
        )
    for document in filter(None, documents):
        _refuse_secrets(document, path)
    return [document for document in documents if document]


def _refuse_secrets(value: Any, path: Path) -> None:
    """Refuse the value of a variable that holds a key by its name: `env` may only refer to a Secret."""
    if isinstance(value, list):
        for one in value:
            _refuse_secrets(one, path)
    if isinstance(value, _Lined):
        if isinstance(name := value.get("name"), str) and is_key_name(name) and value.get("value"):
            raise _error(path, value, f"{name} has its value here", "manifests are stored with the results",
                         hint="put it in a Secret, and name that in K8S_SECRET_NAME")  # fmt: skip
        for one in value.values():
            _refuse_secrets(one, path)


def _merged(old: Any, new: Mapping[str, Any], path: Path) -> Any:
    """Return a mapping with a patch applied. null deletes, `$patch: replace` replaces, `$patch: delete` empties."""
    directive = new.get(DIRECTIVE, "merge")
    if directive == "replace":
        return _plain({key: value for key, value in new.items() if key != DIRECTIVE})
    if directive == "delete":
        return {}
    if directive != "merge":
        raise _error(path, new, f"$patch: {directive}", "expected merge, replace or delete")
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if key == DIRECTIVE:
            continue
        if key.startswith("$"):
            raise _error(path, new, f"{key} is not supported", "only $patch, and null to delete")
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            if isinstance(result.get(key), list):
                raise _error(path, value, f"{key} is a mapping here", "it is a list in the manifest")
            result[key] = _merged(result.get(key), value, path)
        elif isinstance(value, list):
            if isinstance(result.get(key), dict):
                raise _error(path, new, f"{key} is a list here", "it is a mapping in the manifest")
            result[key] = _merged_list(key, result.get(key) or [], value, new, path)
        else:
            result[key] = value
    return result


def _merged_list(name: str, old: list[Any], new: list[Any], owner: Mapping[str, Any], path: Path) -> list[Any]:
    """Return a list with a patch applied: element by element if the list has a merge key, else the new list."""
    elements = [one for one in new if isinstance(one, Mapping)]
    key = MERGE_KEYS.get(name) or next((p for p in PORT_KEYS if name == "ports" and any(p in e for e in elements)), "")
    if not key:
        return [_plain(one) for one in new]
    if any(one.get(DIRECTIVE) == "replace" and len(one) == 1 for one in elements):
        return [_plain(one) for one in new if not (isinstance(one, Mapping) and DIRECTIVE in one)]
    result = list(old)
    for one in new:
        if not isinstance(one, Mapping) or key not in one:
            raise _error(path, one if isinstance(one, _Lined) else owner, f"an element of {name} has no {key}",
                         f"{key} says which element is meant")  # fmt: skip
        at = next((i for i, known in enumerate(result) if known.get(key) == one[key]), None)
        if one.get(DIRECTIVE) == "delete":
            result = [known for known in result if known.get(key) != one[key]]
        elif at is None:
            result.append(_merged({}, one, path))
        else:
            result[at] = _merged(result[at], one, path)
    return result


def _check(path: Path, document: Mapping[str, Any], old: Object, new: Object) -> None:
    """Refuse changes of what the runner, `make status` and `make stop` rely on."""
    kept = [("metadata.name", old["metadata"]["name"], new.get("metadata", {}).get("name"))]
    kept += [("metadata.namespace", *(one.get("metadata", {}).get("namespace") for one in (old, new)))]
    labels, now = old["metadata"]["labels"], new.get("metadata", {}).get("labels") or {}
    kept += [(f"metadata.labels[{key}]", value, now.get(key)) for key, value in labels.items()]
    if old["kind"] == "Service":
        kept += [(f"spec.{key}", value, new.get("spec", {}).get(key)) for key, value in old["spec"].items()]
    else:
        kept += [(name, *values) for name, *values in _pod_facts(old, new)]
    for name, before, after in kept:
        if before != after:
            why = "the runner, make status and make stop rely on it"
            raise _error(path, document, f"{name} cannot be changed", why)


def _pod_facts(old: Object, new: Object) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of what must stay as it is."""
    found = []
    try:
        for one in (old, new):
            spec = one["spec"]
            pod = spec["template"]["spec"]
            ours = next(container for container in pod["containers"] if container["name"] == CONTAINER)
            variables = {entry["name"]: entry for entry in ours["env"]}
            found.append({
                "completions": spec["completions"],
                "completionMode": spec["completionMode"],
                "podReplacementPolicy": spec["podReplacementPolicy"],
                # A selector of the user could choose the pods of other Jobs.
                "selector": (spec.get("selector"), spec.get("manualSelector")),
                "restartPolicy": pod["restartPolicy"],
                "terminationGracePeriodSeconds (use K8S_GRACE)": pod["terminationGracePeriodSeconds"],
                "command": ours["command"],
                "labels of the pods": {key: spec["template"]["metadata"]["labels"].get(key) for key in _labels(old)},
                **{name: variables.get(name) for name in variables if name.startswith("KMATRIX_")},
            })  # fmt: skip
    except (KeyError, TypeError, StopIteration, IndexError):
        return [("the pod template", "the container kmatrix with its command and variables", "something else")]
    before, after = found
    return [(name, before.get(name), after.get(name)) for name in before]


def _labels(job: Object) -> list[str]:
    return list(job["spec"]["template"]["metadata"]["labels"])


def _plain(value: Any) -> Any:
    """Return a value without the directives of patches, and without the deleted (null) members."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None and key != DIRECTIVE}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _error(path: Path, at: Any, what: str, why: str, *, hint: str = HINT) -> ConfigError:
    where = f"{path}:{at.line}" if isinstance(at, _Lined) else str(path)
    return ConfigError(f"{where}: {what}", why=why, hint=hint)
