"""Requests to the Kubernetes API, through the official client, with answers as plain JSON and errors as sentences.

The client is imported when the first request is made: only ENGINE=kubernetes needs it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.kubernetes.manifests import Object
from kmatrix.errors import LaunchError
from kmatrix.text import printable

TIMEOUT_S = (5.0, 30.0)  # to connect, and for an answer; each is tried twice, as long as nothing can be done twice
PAGE = 500  # objects of one answer
CONFLICT, NOT_FOUND, FORBIDDEN, TOO_MANY = 409, 404, 403, 429
# Nothing is known about the request: ask again later. 410: a list changed too much while its pages were read.
ASK_AGAIN = frozenset({410, TOO_MANY, 500, 502, 503, 504})
WAITS_S = (1.0, 2.0, 4.0)  # between the tries of a request that the server has put off, at least
LONGEST_S = 10.0  # between two of them, whatever Retry-After says
INSTALL = "run `make setup-kubernetes`"
RIGHTS = re.compile(r"cannot \w+ resource")  # in the message about a request that the user may not make


class ApiRefusedError(LaunchError):
    """The API server answered, and did not do what it was asked for. code: of HTTP."""

    def __init__(self, what: str, *, why: str = "", hint: str = "", code: int = 0) -> None:
        self.code = code
        super().__init__(what, why=why, hint=hint)


@dataclass(slots=True)
class Api:
    """The API server of a context, and one namespace there."""

    context: str = ""  # of the kubeconfig; "": the current one, or that of the pod
    namespace: str = ""  # "": that of the context
    _client: Any = field(default=None, repr=False)
    _place: str = ""

    @property
    def place(self) -> str:
        """The namespace in use."""
        self._open()
        return self._place

    def create(self, value: Object, *, dry_run: bool = False) -> Object:
        """Create an object and return it as stored. dry_run: only check. Raises ApiRefusedError, UnreachableError."""
        options: dict[str, Any] = {"field_manager": "kmatrix", **({"dry_run": "All"} if dry_run else {}), **RAW}
        kind, name = value["kind"], value["metadata"]["name"]
        place = value["metadata"].get("namespace") or self.place
        calls: Mapping[str, Callable[[], Any]] = {
            "Job": lambda: self._batch().create_namespaced_job(place, value, **options),
            "Service": lambda: self._core().create_namespaced_service(place, value, **options),
        }
        return self._json(calls[kind], f"{kind} {name}")

    def read(self, kind: str, name: str) -> Object | None:
        """Return an object, None if there is none."""
        calls: Mapping[str, Callable[[], Any]] = {
            "Job": lambda: self._batch().read_namespaced_job(name, self.place, **RAW),
            "PersistentVolumeClaim": lambda: self._core().read_namespaced_persistent_volume_claim(
                name, self.place, **RAW
            ),
        }
        try:
            return self._json(calls[kind], f"{kind} {name}")
        except ApiRefusedError as error:
            if error.code == NOT_FOUND:
                return None
            raise

    def jobs(self, labels: str) -> Iterator[Object]:
        """Yield the Jobs with these labels (a label selector)."""
        yield from self._pages(lambda **page: self._batch().list_namespaced_job(self.place, **page), labels, "Jobs")

    def pods(self, labels: str) -> Iterator[Object]:
        """Yield the pods with these labels."""
        yield from self._pages(lambda **page: self._core().list_namespaced_pod(self.place, **page), labels, "pods")

    def events(self, kind: str, reason: str) -> Iterator[Object]:
        """Yield the events of a reason about objects of a kind."""
        chosen = f"involvedObject.kind={kind},reason={reason}"
        yield from self._pages(
            lambda **page: self._core().list_namespaced_event(self.place, field_selector=chosen, **page), "", "events"
        )

    def nodes(self, labels: str) -> Iterator[Object]:
        """Yield the nodes of the cluster with these labels. Many users may not list them: ApiRefusedError."""
        yield from self._pages(lambda **page: self._core().list_node(**page), labels, "nodes")

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what belongs to it, if there is one."""
        options: dict[str, Any] = {"propagation_policy": "Foreground", **RAW}
        calls: Mapping[str, Callable[[], Any]] = {
            "Job": lambda: self._batch().delete_namespaced_job(name, self.place, **options),
            "Service": lambda: self._core().delete_namespaced_service(name, self.place, **options),
        }
        try:
            self._json(calls[kind], f"{kind} {name}")
        except ApiRefusedError as error:
            if error.code != NOT_FOUND:
                raise

    def delete_pods(self, labels: str) -> None:
        """Kill all pods with these labels at once."""
        self._json(
            lambda: self._core().delete_collection_namespaced_pod(
                self.place, label_selector=labels, grace_period_seconds=0, **RAW
            ),
            "pods",
        )

    def set_owners(self, service: str, owners: list[Object]) -> None:
        """Set the owners of a Service: it is deleted after the last of them."""
        body = {"metadata": {"ownerReferences": owners}}
        self._json(
            lambda: self._core().patch_namespaced_service(service, self.place, body, **RAW), f"Service {service}"
        )

    def _pages(self, ask: Callable[..., Any], labels: str, what: str) -> Iterator[Object]:
        options: dict[str, Any] = {"limit": PAGE, **({"label_selector": labels} if labels else {}), **RAW}
        while True:
            page = self._json(lambda: ask(**options), what)
            yield from page.get("items") or ()
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            options["_continue"] = token

    def _json(self, call: Callable[[], Any], what: str) -> Object:
        """Return the answer of a call as JSON. Raises ApiRefusedError, or UnreachableError without an answer.

        A request that the server has put off, and not executed, is repeated a few times.
        """
        self._open()
        from kubernetes.client import ApiException
        from kubernetes.client.exceptions import OpenApiException
        from urllib3.exceptions import HTTPError

        host, waits = self._client.configuration.host, list(WAITS_S)
        while True:
            try:
                text = call().data  # read here: a connection may end in the middle of an answer
            except ApiException as error:
                if not waits or not _is_put_off(error):
                    raise _refusal(error, what) from None
                time.sleep(max(waits.pop(0), min(_retry_after(error), LONGEST_S)))
                continue
            except (HTTPError, OSError) as error:
                raise _unreachable(f"{host}: {_transport(error)}") from None
            except (OpenApiException, ValueError) as error:  # the client checks values itself
                raise ApiRefusedError(f"the client of Kubernetes refuses {what}", why=printable(str(error))) from None
            try:
                found: Object = dict(json.loads(text))
            except (TypeError, ValueError):  # of a proxy, or of a page to log in
                raise _unreachable(f"{host}: the answer is not JSON; is a proxy in between?") from None
            return found

    def _open(self) -> None:
        """Load the kubeconfig, or inside a pod that of its service account."""
        if self._client is not None:
            return
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
            from yaml import YAMLError
        except ImportError:
            raise LaunchError(
                "the client of Kubernetes is not installed", why="ENGINE=kubernetes needs it", hint=INSTALL
            ) from None
        configuration = client.Configuration()
        file = os.environ.get("KUBECONFIG") or None  # the client reads it once, when it is imported
        try:
            try:
                config.load_kube_config(file, context=self.context or None, client_configuration=configuration)
                self._place = self.namespace or _namespace(config, file, self.context)
            except ConfigException as error:
                if self.context:
                    raise
                try:
                    config.load_incluster_config(client_configuration=configuration)
                except ConfigException:
                    raise error from None  # outside of a pod, the kubeconfig has the reason
                self._place = self.namespace or _own_namespace()
        # A file with another content raises what its first wrong value happens to raise.
        except (ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError, YAMLError) as error:
            raise LaunchError(
                "no cluster is configured" if not self.context else f"no context {self.context} in the kubeconfig",
                why=f"{file or '~/.kube/config'}: {' '.join(printable(str(error)).split())}",
                hint="`kubectl config get-contexts` shows what there is; K8S_CONTEXT= selects one",
            ) from None
        from urllib3 import Retry

        configuration.retries = Retry(2, read=1, respect_retry_after_header=False)  # it may say hours
        self._client = client.ApiClient(configuration)

    def _core(self) -> Any:
        from kubernetes import client

        self._open()
        return client.CoreV1Api(self._client)

    def _batch(self) -> Any:
        from kubernetes import client

        self._open()
        return client.BatchV1Api(self._client)


# Answers are not parsed into objects of the client, which are large, and which know one version of Kubernetes.
RAW: Mapping[str, Any] = {"_preload_content": False, "_request_timeout": TIMEOUT_S}


def _refusal(error: Any, what: str) -> LaunchError:
    """Return what an error of the API server means for a request."""
    message = _message(error)
    if not error.status or error.status in ASK_AGAIN or _is_put_off(error):
        return _unreachable(f"status {error.status}: {message}")
    hint = "log in to the cluster again; `kubectl auth whoami` tries it" if error.status == 401 else ""
    if error.status == FORBIDDEN:  # by the rights of the user, or by admission: a quota, a policy
        hint = "see docs/kubernetes.md, Permissions" if RIGHTS.search(message) else ""
        hint = "`kubectl describe quota` shows what is left" if "exceeded quota" in message else hint
    return ApiRefusedError(f"Kubernetes refuses {what}", why=message, hint=hint, code=error.status)


def _is_put_off(error: Any) -> bool:
    """Return whether the server has not executed a request, and asks to repeat it.

    Too many requests; or a quota that another request has changed meanwhile, which says nothing about the object:
    https://github.com/kubernetes/kubernetes/issues/67761
    """
    return error.status == TOO_MANY or (error.status == CONFLICT and _status(error).get("reason") == "Conflict")


def _retry_after(error: Any) -> float:
    """Return the seconds that the server asks to wait, 0 without a number."""
    text = str((error.headers or {}).get("Retry-After") or "")
    return float(text) if text.isascii() and text.isdecimal() else 0.0


def _unreachable(why: str) -> UnreachableError:
    return UnreachableError(
        "Kubernetes does not answer", why=printable(why), hint="try `kubectl get jobs`; jobs go on without an answer"
    )


def _transport(error: Exception) -> str:
    """Return why there was no connection, without the names of Python's objects."""
    words = [one for one in error.args if isinstance(one, str)]
    text = str(getattr(error, "reason", None) or (words[0] if words else error))
    return re.sub(r"HTTPS?Connection(Pool)?\([^)]*\): |<[^>]*>[:,] ?", "", text)


def _message(error: Any) -> str:
    """Return the message of the API server in an error."""
    return printable(str(_status(error).get("message") or error.reason or "no reason given"))


def _status(error: Any) -> Object:
    """Return the Status object in an error, an empty one without."""
    try:
        found = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _namespace(config: Any, file: str | None, context: str) -> str:
    """Return the namespace of a context, as kubectl uses it."""
    contexts, current = config.list_kube_config_contexts(file)
    chosen = next((one for one in contexts if one["name"] == context), current) if context else current
    return str((chosen or {}).get("context", {}).get("namespace") or "default")


def _own_namespace() -> str:
    """Return the namespace of the pod that this process runs in."""
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8").strip()
