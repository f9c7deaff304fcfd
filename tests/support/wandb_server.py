"""A server on loopback with the part of W&B's protocol that runs and `wandb sync` need; it stores what it receives.

GraphQL: the owner of the key, the resume status of a run, upserts, upload URLs, alerts. Then the file stream of the
rows: lines at an offset, so that rows that are sent twice are stored once.
"""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "local-" + "0" * 40  # has the form of a key, but is not one
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class ServerRun:
    """One run as the server stores it. lines: of its history.  exit_code: None until the run is closed."""

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
    """`with WandbServer() as server`: `environment` points the client to it; `runs` are the stored runs by id.

    refuse: a part of the path -> status of the reply to all requests with that part from now on.
    """

    def __init__(self) -> None:
        self.runs: dict[str, ServerRun] = {}
        self.refuse: dict[str, int] = {}
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                status, value = outer.respond(self.path, body)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST  # noqa: N815
            do_PUT = do_POST  # noqa: N815

            def log_message(self, *arguments: object) -> None:
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

    def respond(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the reply."""
        with self._lock:
            self.requests.append(path)
            for part, status in self.refuse.items():
                if part in path:
                    return status, {"errors": [{"message": "refused"}]}
            if path == "/graphql":
                query = json.loads(body)
                return 200, {"data": self._graphql(query["operationName"], query.get("variables") or {})}
            if path.endswith("/file_stream"):
                self._stream(self.runs[path.split("/")[-2]], json.loads(body))
            return 200, {}

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("runName") or variables.get("run") or ""
        if operation == "Viewer":
            viewer = {"id": "1", "entity": "team", "username": "somebody", "email": "", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            run = self.runs.get(name)
            return {
                "model": {"id": "1", "name": variables["project"], "entity": TEAM, "bucket": run and _bucket(name, run)}
            }
        if operation == "UpsertBucket":
            inserted = name not in self.runs
            run = self.runs.setdefault(name, ServerRun())
            run.upserts.append(variables)
            project = {"id": "1", "name": variables["project"], "entity": TEAM}
            return {"upsertBucket": {"bucket": {**_bucket(name, run), "project": project}, "inserted": inserted}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.root}/storage/{name}/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if operation == "NotifyScriptableRunAlert":
            self.runs[name].alerts.append((variables["title"], variables["severity"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        return {}

    @staticmethod
    def _stream(run: ServerRun, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == HISTORY:
                run.lines[part["offset"] : part["offset"] + len(lines)] = lines
            elif name == SUMMARY and lines:
                run.summary = lines[-1]
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")


TEAM = {"id": "1", "name": "team"}


def _bucket(name: str, run: ServerRun) -> dict[str, Any]:
    """Return a run as W&B describes it. From `historyTail`, its last line, the client takes the next step."""
    first_upsert = run.upserts[0] if run.upserts else {}
    return {
        "id": name,
        "name": name,
        "displayName": first_upsert.get("displayName") or name,
        "description": "",
        "config": first_upsert.get("config") or "{}",
        "sweepName": None,
        "tags": first_upsert.get("tags") or [],
        "notes": "",
        "summaryMetrics": json.dumps(run.summary),
        "wandbConfig": '{"t": 1}',  # without it the W&B client thinks that the run never started
        "logLineCount": 0,
        "historyLineCount": len(run.lines),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(line) for line in run.lines[-1:]]),
        "eventsTail": "[]",
    }
