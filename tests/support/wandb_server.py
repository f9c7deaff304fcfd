"""A server on loopback that speaks as much of W&B's protocol as runs and `wandb sync` need, and keeps what it is sent.

GraphQL: who the key's owner is, what is there of a run, a run begun or changed, places for its files, alerts.
Then the stream of a run's rows: lines at an offset, so that what is sent twice stands there once.
"""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "local-" + "0" * 40  # shaped like a key; it opens nothing
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class Kept:
    """One run as the server has it. lines: of its history.  exit_code: None while it is open."""

    upserts: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def steps(self) -> list[int]:
        return [line["_step"] for line in self.lines]

    @property
    def config(self) -> dict[str, Any]:
        """The newest configuration, without W&B's own part."""
        text = [upsert["config"] for upsert in self.upserts if upsert.get("config")][-1]
        return {name: item["value"] for name, item in json.loads(text).items() if name != "_wandb"}

    def first(self, name: str) -> Any:
        """Return the configuration with which a run started."""
        return self.upserts[0][name]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore a client that disconnects."""


class WandbServer:
    """`with WandbServer() as server`: environment leads the client to it; runs holds what came, by id.

    refuse: a path's part and the status with which requests to it are answered from now on.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Kept] = {}
        self.refuse: dict[str, int] = {}
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                status, value = outer.answer(self.path, body)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST  # noqa: N815
            do_PUT = do_POST  # noqa: N815

            def log_message(self, *words: object) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._lock = threading.Lock()

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.root, "WANDB_API_KEY": KEY}

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer."""
        with self._lock:
            self.requests.append(path)
            for part, status in self.refuse.items():
                if part in path:
                    return status, {"errors": [{"message": "refused"}]}
            if path == "/graphql":
                asked = json.loads(body)
                return 200, {"data": self._graphql(asked["operationName"], asked.get("variables") or {})}
            if path.endswith("/file_stream"):
                self._stream(self.runs[path.split("/")[-2]], json.loads(body))
            return 200, {}

    def _graphql(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        name = given.get("name") or given.get("runName") or given.get("run") or ""
        if operation == "Viewer":
            viewer = {"id": "1", "entity": "team", "username": "somebody", "email": "", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            kept = self.runs.get(name)
            return {
                "model": {"id": "1", "name": given["project"], "entity": TEAM, "bucket": kept and _bucket(name, kept)}
            }
        if operation == "UpsertBucket":
            inserted = name not in self.runs
            kept = self.runs.setdefault(name, Kept())
            kept.upserts.append(given)
            project = {"id": "1", "name": given["project"], "entity": TEAM}
            return {"upsertBucket": {"bucket": {**_bucket(name, kept), "project": project}, "inserted": inserted}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.root}/storage/{name}/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if operation == "NotifyScriptableRunAlert":
            self.runs[name].alerts.append((given["title"], given["severity"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        return {}

    @staticmethod
    def _stream(kept: Kept, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == HISTORY:
                kept.lines[part["offset"] : part["offset"] + len(lines)] = lines
            elif name == SUMMARY and lines:
                kept.summary = lines[-1]
        if sent.get("complete"):
            kept.exit_code = sent.get("exitcode")


TEAM = {"id": "1", "name": "team"}


def _bucket(name: str, kept: Kept) -> dict[str, Any]:
    """Return W&B's view of a run. `historyTail` is its last line: it tells a client the next step."""
    given = kept.upserts[0] if kept.upserts else {}
    return {
        "id": name,
        "name": name,
        "displayName": given.get("displayName") or name,
        "description": "",
        "config": given.get("config") or "{}",
        "sweepName": None,
        "tags": given.get("tags") or [],
        "notes": "",
        "summaryMetrics": json.dumps(kept.summary),
        "wandbConfig": '{"t": 1}',  # without it W&B's client takes the run for one that was never begun
        "logLineCount": 0,
        "historyLineCount": len(kept.lines),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(line) for line in kept.lines[-1:]]),
        "eventsTail": "[]",
    }
