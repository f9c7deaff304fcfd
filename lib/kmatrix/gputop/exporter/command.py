"""The command line of the exporter: sample the GPUs in a thread, and serve the newest sample."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from kmatrix.errors import LaunchError, reason_of
from kmatrix.gputop.command import INTERVAL
from kmatrix.gputop.exporter.metrics import GpuCollector
from kmatrix.gputop.feeds import LiveFeed
from kmatrix.gputop.loop import Session
from kmatrix.gputop.make import end_with_make
from kmatrix.hosts import WsgiApp, guarded_wsgi
from kmatrix.output import run_program
from kmatrix.text import plural

ADDRESS = "127.0.0.1"  # run names and the use of GPUs are not for everyone on the network
PORT = 9835  # not dcgm-exporter's 9400: both may run
REQUEST_S = 5.0  # time that a client may take for its request
JOIN_S = 2.0  # time for a pending query of the driver at the end


class MetricsHandler(WSGIRequestHandler):
    """Answers one client, quietly: a scrape per second would fill a log."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        pass


class MetricsHttpServer(ThreadingMixIn, WSGIServer):
    """Answers each client in a thread of its own, so that a slow one does not block the others."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected or was too slow."""


class Sampler:
    """Samples the GPUs until it is stopped."""

    def __init__(self, session: Session, collector: GpuCollector, interval: float) -> None:
        self._session, self._collector, self._interval = session, collector, interval
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Stop sampling. Return whether the thread has ended, so that the driver can be closed."""
        self._ending.set()
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._session.poll()
            if self._session.sample is not None:
                self._collector.ingest(self._session.sample)
            if self._ending.wait(self._interval):
                return


def main(argv: Sequence[str]) -> int:
    """Serve metrics until Ctrl+C or SIGTERM. Raises KmatrixError for user errors."""
    options = _parser().parse_args(argv)
    feed = LiveFeed(interval=options.interval)
    session = Session(feed=feed, asked=options.gpus)
    session.poll()  # checks --gpus
    collector = GpuCollector(feed.facts)
    server = _server(options.port, application(collector))
    sampler = Sampler(session, collector, options.interval)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_make()
    gpus = len(session.sample.snapshot.samples) if session.sample else 0
    print(greeting(server.server_port, gpus, feed.notices()), flush=True)
    sampler.start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
        if sampler.stop():  # else a hanging driver would hang the end, too
            feed.close()
    return 0


def run(argv: Sequence[str]) -> int:
    """Run the exporter as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))


def greeting(port: int, gpus: int, notices: Sequence[str]) -> str:
    """Return what the exporter prints at its start. notices: why there is no GPU."""
    why = "; ".join(notice.rstrip(".") for notice in notices) or "no GPU"  # some are sentences of the driver
    what = plural(gpus, "GPU") if gpus else f"its own metrics only ({why})"
    return f"serving http://{ADDRESS}:{port}/metrics for {what}; Ctrl+C ends it"


def application(collector: GpuCollector) -> WsgiApp:
    """Return the WSGI application: GET and HEAD of /metrics, for requests that name this machine."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(namespace="kmatrix_exporter", registry=registry)
    metrics: Any = make_wsgi_app(registry)

    def routed(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        plain = [("Content-Type", "text/plain; charset=utf-8")]
        if environ["REQUEST_METHOD"] != "GET":
            start("405 Method Not Allowed", plain)
            return [b"only GET\n"]
        if environ["PATH_INFO"] != "/metrics":
            start("404 Not Found", plain)
            return [b"see /metrics\n"]
        body: Iterable[bytes] = metrics(environ, start)
        return body

    return with_head(guarded_wsgi(routed))


def with_head(app: WsgiApp) -> WsgiApp:
    """Return a WSGI application that answers HEAD with the headers of GET, the length of its body included."""

    def answered(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return app(environ, start)
        started: list[tuple[str, list[tuple[str, str]]]] = []
        body = app({**environ, "REQUEST_METHOD": "GET"}, lambda status, headers: started.append((status, headers)))
        length = sum(map(len, body))
        status, headers = started[0]
        # Without it, the server would state the length of what follows: 0.
        start(status, [*headers, ("Content-Length", str(length))])
        return []

    return answered


def _server(port: int, app: WsgiApp) -> MetricsHttpServer:
    try:
        server = MetricsHttpServer((ADDRESS, port), MetricsHandler)
    except OSError as error:
        raise LaunchError(
            f"cannot serve metrics on port {port} of {ADDRESS}",
            why=reason_of(error),
            hint="pass another one: make gpu-exporter PORT=9836",
        ) from None
    server.set_app(app)
    return server


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-exporter", description="Serve the GPUs as metrics for Prometheus.")
    parser.add_argument("--port", type=_port, default=PORT, help=f"of {ADDRESS} (default {PORT})")
    parser.add_argument("--gpus", metavar="LIST", help="only these GPUs, by index or UUID: 0,2")
    parser.add_argument("--interval", type=INTERVAL, default=1.0, metavar="S", help="between two samples (default 1)")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: a number from 0 to 65535")
    return int(text)
