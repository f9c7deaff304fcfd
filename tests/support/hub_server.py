"""A server on loopback that speaks the Hugging Face protocol for datasets, so that tests can use the real client.

Paths: /api/datasets/OWNER/NAME[/revision/REV] (the commit), .../tree/COMMIT (the files, in pages), and
/datasets/OWNER/NAME/resolve/COMMIT/PATH, which redirects to a "CDN" on the same server, as for files in LFS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote, urlsplit

from local_server import LocalServer, send

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = 3  # files per page of the tree, so that a small dataset has several pages


class HubServer(LocalServer):
    """`with HubServer({"owner/name": {"path": b"..."}}) as hub`: hub.environment(...) points the client to it.

    corrupt: paths whose content differs from the tree's hash.  token: required by gated datasets.
    """

    def __init__(self, datasets: Mapping[str, Mapping[str, bytes]], *, token: str = "") -> None:
        self.datasets = datasets
        bodies = {f"cdn/{name}/{path}": body for name, files in datasets.items() for path, body in files.items()}
        super().__init__(bodies, handler=self.protocol)
        self.corrupt: set[str] = set()
        self.token = token

    def environment(self, folder: object) -> dict[str, str]:
        """Return variables that point huggingface_hub to this server. folder: for its cache."""
        names = {"HF_ENDPOINT": self.root, "HF_HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return names | {"HF_HUB_OFFLINE": "0"}  # Trackio sets it, for this process and what it starts

    def fetched_ranges(self, path: str) -> list[str]:
        """Return the byte ranges of all requests for the content of a file."""
        return [byte_range for method, url, byte_range in self.requests if method == "GET" and f"cdn/{path}" in url]

    def protocol(self, request: BaseHTTPRequestHandler) -> bool:
        url = urlsplit(request.path)
        segments = unquote(url.path).strip("/").split("/")
        if segments[0] == "cdn":
            return self._content(request, "/".join(segments))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            _json(request, {"error": "Access to this dataset is restricted"}, 401, {"X-Error-Code": "GatedRepo"})
            return True
        start = 2 if segments[:2] == ["api", "datasets"] else 1
        name = "/".join(segments[start : start + 2])
        files, rest = self.datasets.get(name), segments[start + 2 :]
        if files is None:
            _json(request, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif start == 1:
            self._resolve(request, name, rest)
        elif rest[:1] == ["tree"]:
            self._tree(request, files, parse_qs(url.query))
        elif rest and rest[1] not in ("main", COMMIT):
            _json(request, {"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": path} for path in files]
            _json(request, {"id": name, "sha": COMMIT, "private": False, "gated": False, "siblings": siblings})
        return True

    def _tree(
        self, request: BaseHTTPRequestHandler, files: Mapping[str, bytes], query: Mapping[str, list[str]]
    ) -> None:
        first = int(query.get("cursor", ["0"])[0])
        paths = sorted(files)
        page = [_entry(path, files[path]) for path in paths[first : first + PAGE]]
        following = f"{self.root}{urlsplit(request.path).path}?recursive=true&cursor={first + PAGE}"
        _json(request, page, headers={"Link": f'<{following}>; rel="next"'} if first + PAGE < len(paths) else {})

    def _resolve(self, request: BaseHTTPRequestHandler, name: str, rest: list[str]) -> None:
        """Describe a file and redirect to its content."""
        path = "/".join(rest[2:])
        body = self.datasets[name].get(path)
        if body is None:
            _json(request, {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(body)),
            "X-Linked-ETag": f'"{digest}"',
            "ETag": f'"{digest}"',
            "Location": f"{self.root.replace('127.0.0.1', 'localhost')}/cdn/{name}/{quote(path)}",
        }
        send(request, 302, b"", headers)

    def _content(self, request: BaseHTTPRequestHandler, name: str) -> bool:
        if name in self.corrupt:
            body = self.files[name]
            self.files[name] = body[:-1] + bytes([body[-1] ^ 1])
            self.send_file(request, name)
            self.files[name] = body
        else:
            self.send_file(request, name)
        return True


def _entry(path: str, body: bytes) -> dict[str, object]:
    digest = hashlib.sha256(body).hexdigest()
    lfs = {"oid": digest, "size": len(body), "pointerSize": 133}
    return {"type": "file", "path": path, "size": len(body), "oid": digest[:40], "lfs": lfs}


def _json(
    request: BaseHTTPRequestHandler, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    send(request, status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})
