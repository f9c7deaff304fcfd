"""Serve a checkpoint with OpenAI's completions API: /v1/completions with streaming, /v1/models, /health.

python -m gpt2.inference.server CHECKPOINT --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hmac
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt2.generate import BatchGenerator, GeneratedText
from gpt2.inference.completions import (
    Completion,
    CompletionRequest,
    RefusedError,
    choice,
    logprobs_of,
    parse,
    usage,
)
from gpt2.inference.restore import Restored, restore
from gpt2.model.base import LanguageModel
from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.hosts import LOOPBACK, REFUSED, host_name, is_accepted, server_address
from kmatrix.output import run_program

MAX_BODY = 256 * 1024  # bytes per request
ROWS, WAITING = 8, 64  # texts generated at once, and texts in the queue
SLOWEST_BODY_S = 15.0  # time limit for receiving a body
GRACE_S = 5  # for responses in progress after Ctrl+C
RETRY_S = 1  # Retry-After of a full queue
KEY = "KMATRIX_API_KEY"  # environment variable with the required API key


@dataclass(frozen=True, slots=True)
class TextEvent:
    """The news of one text."""

    number: int  # of the text in its request
    new: str | Exception  # new text, or the error that ended it
    finish: str | None
    logprobs: dict[str, Any] | None = None  # of the tokens in `new`


class Service:
    """The routes of one model."""

    def __init__(self, restored: Restored, *, rows: int = ROWS, waiting: int = WAITING) -> None:
        self.restored, self.created = restored, int(time.time())
        self.batcher = Batcher(restored.model, rows=rows, waiting=waiting)

    async def health(self, request: HttpRequest) -> Response:  # noqa: ARG002  (the signature of a route)
        writing, waiting = self.batcher.load
        about = {"status": "ok", "model": self.restored.name, "step": self.restored.step}
        return JSONResponse({**about, "writing": writing, "waiting": waiting})

    async def models(self, request: HttpRequest) -> Response:
        name = self.restored.name
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "kmatrix"}
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [about]})
        if wanted != name:
            raise RefusedError(f"the model {wanted!r} is not served here", status=404, code="model_not_found")
        return JSONResponse(about)

    async def completions(self, http: HttpRequest) -> Response:
        shape = self.restored.model.shape
        request = parse(
            await read_body(http),
            model=self.restored.name,
            tokenizer=self.restored.tokenizer,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
        )
        texts = request.texts(self.restored.tokenizer)
        events = self._submit(request, texts)  # before the response starts, so that a full queue is a status of its own
        answer = Completion.new(self.restored.name)
        if request.stream:
            lines = streamed(answer, request, texts, self._events(texts, events))
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async for _ in self._events(texts, events, http):
            pass  # the texts collect their own parts
        choices = [
            choice(number, request.echoed(number) + text.text, text.finish, complete_logprobs(request, number, text))
            for number, text in enumerate(texts)
        ]
        return JSONResponse(answer.part(choices, usage=usage(texts, request.n)))

    def _submit(self, request: CompletionRequest, texts: Sequence[GeneratedText]) -> asyncio.Queue[TextEvent]:
        """Submit texts for generation, and return the queue of their events."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TextEvent]()
        numbers = {text: number for number, text in enumerate(texts)}

        def report(text: GeneratedText, new: str | Exception) -> None:
            # In the generating thread: asyncio's queues belong to the loop's thread. text.finish is read now, because
            # it may have changed when the event is handled.
            number = numbers[text]
            scores = logprobs_of(text, text.take_scores(), len(request.echoed(number))) if request.stream else None
            event = TextEvent(number, new, text.finish, scores)
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the loop is closed: the server has shut down, and nobody waits for the texts
                self.batcher.cancel(texts)

        try:
            self.batcher.submit(texts, report)
        except BusyError:
            message = "the queue is full: try again"
            raise RefusedError(message, status=429, code="queue_full") from None
        return events

    async def _events(
        self, texts: Sequence[GeneratedText], events: asyncio.Queue[TextEvent], http: HttpRequest | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        """Yield events until every text has finished. Cancel the texts if the client disconnects."""
        unfinished = len(texts)
        try:
            while unfinished:
                try:
                    event = await asyncio.wait_for(events.get(), 0.5)
                except TimeoutError:
                    # A streamed response notices it by itself: Starlette closes the generator.
                    if http and await http.is_disconnected():
                        return
                    continue
                if isinstance(event.new, Exception):  # its text may contain paths: it is in the server's output only
                    raise RefusedError("the model failed; see the server's output", status=500)
                unfinished -= event.finish is not None
                yield event
        finally:  # also if the generator is closed: nobody reads these texts any more
            self.batcher.cancel(texts)


def complete_logprobs(request: CompletionRequest, number: int, text: GeneratedText) -> dict[str, Any] | None:
    """Return the log-probabilities of a finished text, after those of its prompt if that is returned."""
    prompt = request.echoed(number)
    own = logprobs_of(text, text.take_scores(), len(prompt))
    before = logprobs_of(text, text.prompt_scores)
    if own is None or before is None or not prompt:
        return own
    return {name: None if values is None else [*before[name], *values] for name, values in own.items()}


async def streamed(
    answer: Completion,
    request: CompletionRequest,
    texts: Sequence[GeneratedText],
    events: AsyncGenerator[TextEvent, None],
) -> AsyncIterator[str]:
    """Yield a response as server-sent events, ending with `[DONE]`."""
    try:
        echoed: set[int] = set()  # numbers of the texts whose prompt was sent
        # aclosing: if the client disconnects, the texts are cancelled now, not when the generator is collected.
        async with aclosing(events):
            async for event in events:
                number = event.number
                if request.echo and number not in echoed:  # only now: its scores are known with the first token
                    echoed.add(number)
                    scores = logprobs_of(texts[number], texts[number].prompt_scores)
                    yield line(answer.part([choice(number, request.echoed(number), None, scores)]))
                yield line(answer.part([choice(number, str(event.new), event.finish, event.logprobs)]))
        if request.usage:
            yield line(answer.part([], usage=usage(texts, request.n)))
    except RefusedError as error:  # the response has started: its status cannot change
        yield line(error.body())
        return
    yield "data: [DONE]\n\n"


def line(value: Any) -> str:
    """Return a value as one server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"  # JSON escapes line breaks, which would end the event


async def read_body(request: HttpRequest) -> bytes:
    """Return the body of a request. Raises RefusedError if it is too large, too slow or not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError("the body must be application/json", status=415)
    too_large = RefusedError(f"the body exceeds {MAX_BODY} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "0")  # refuse before reading; it may be missing or wrong, see below
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise RefusedError("the body did not arrive in time", status=408) from None
    return bytes(body)


class RequestGuard:
    """Rejects requests for other host names (on the loopback interface) or without the API key (if one is set).

    The check of the Host header prevents DNS rebinding attacks from web pages.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], key: str | None) -> None:
        self.app, self.hosts, self.key = app, hosts, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(HttpRequest(scope))):
            await error_answer(refused)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refused(self, request: HttpRequest) -> RefusedError | None:
        host = request.headers.get("host", "")
        if not is_accepted(host, self.hosts):
            return RefusedError(f"this server is not {host_name(host)}", status=REFUSED)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # compare_digest takes the same time for any wrong key: == would tell how many characters are right.
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            return RefusedError("the key is missing or wrong", status=401, code="invalid_api_key")
        return None


def error_answer(error: RefusedError) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_S)} if error.status == 429 else {}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _refuse(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001  (the signature of a handler)
    assert isinstance(error, RefusedError)
    return error_answer(error)


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 500))
    return error_answer(RefusedError(f"{request.method} {request.url.path}: not found", status=status))


def application(service: Service, *, hosts: Sequence[str] = LOOPBACK, key: str | None = None) -> ASGIApp:
    """Return the ASGI application. hosts: accepted host names of this server; (): any."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        service.batcher.close()

    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.models),
        Route("/v1/completions", service.completions, methods=["POST"]),
    ]
    handlers: Any = {RefusedError: _refuse, 404: _no_route, 405: _no_route}
    # The guard is outermost: a refused request reaches no route, not even to learn which ones exist.
    return RequestGuard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), hosts=hosts, key=key)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.server", description="Serve a checkpoint's model.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="")
    args = parser.parse_args(argv)
    try:
        with listening(args.host, args.port) as listener:
            serve(restore(args.checkpoint, args.device), listener, args.host)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound before the model is loaded. Raises LaunchError if that fails."""
    if not 0 <= port < 65536:
        raise LaunchError(f"invalid PORT={port}", hint="pass a number up to 65535; 0 selects a free port")
    try:
        address = server_address(host).address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        # A restarted server can bind while connections of the previous one are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except (OSError, UnicodeError) as error:
        port_error = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise LaunchError(
            f"cannot listen on {host}, port {port}",
            why=getattr(error, "strerror", "") or str(error),
            hint="pass another PORT=, or PORT=0 for a free one"
            if port_error
            else f"pass an address of this machine as HOST=, or omit it: the default is {LOOPBACK[0]}",
        ) from None
    return listener


def serve(restored: Restored, listener: socket.socket, host: str) -> None:
    """Serve until Ctrl+C. Responses in progress then have GRACE_S seconds. host: the address, as it was written."""
    key = os.environ.get(KEY) or None
    address = server_address(listener.getsockname()[0])  # the one that is bound
    hosts = () if address.is_open else (*address.names, host.lower())
    if address.is_open and not key:
        print(f"warning: {address.address} is open to everyone: set {KEY} in the environment", file=sys.stderr)
    elif address.is_open:
        print(f"note: on {address.address}, requests may name any host; they need the key", file=sys.stderr)
    app = application(Service(restored), hosts=hosts, key=key)
    url = f"http://{address.url_host}:{listener.getsockname()[1]}"
    device = next(restored.model.parameters()).device.type
    print(f"{restored.name}, step {restored.step}, on {device}: {url}/v1 (OpenAI's completions API); Ctrl+C stops it")
    body = f'{{"model": "{restored.name}", "prompt": "The ", "max_tokens": 32}}'
    print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, server_header=False, ws="none"
    )
    uvicorn.Server(config).run(sockets=[listener])


# Receives the new part of a text (the last time with its `finish` set), or the error that ended it.
Report = Callable[[GeneratedText, "str | Exception"], None]


class BusyError(Exception):
    """The queue of texts is full."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text in the queue, and the callback for its events."""

    text: GeneratedText
    report: Report


class Batcher:
    """Generates up to `rows` texts at once; up to `waiting` more are queued, first come first served.

    Continuous batching: a text joins at any step, so a short one never waits for a long one. `report` is called in the
    generating thread and must not block.
    """

    def __init__(self, model: LanguageModel, *, rows: int, waiting: int) -> None:
        self.model, self.rows, self.most_waiting = model, rows, waiting
        # The batch belongs to the thread; the rest is shared, and guarded by _changed.
        self._batch = BatchGenerator(model, rows)
        self._waiting: deque[TextRequest] = deque()
        self._jobs: dict[GeneratedText, TextRequest] = {}  # of active texts
        self._cancelled: set[GeneratedText] = set()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="texts", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of active and of queued texts."""
        with self._changed:
            return len(self._jobs), len(self._waiting)

    def submit(self, texts: Sequence[GeneratedText], report: Report) -> None:
        """Queue texts, all or none. Raises BusyError if there is not enough space."""
        with self._changed:
            room = self.most_waiting + self.rows - len(self._jobs) - len(self._waiting)
            if len(texts) > room or self._closing:
                raise BusyError
            self._waiting.extend(TextRequest(text, report) for text in texts)
            self._changed.notify()

    def cancel(self, texts: Sequence[GeneratedText]) -> None:
        """Cancel texts. Finished texts are ignored."""
        with self._changed:
            gone = set(texts)
            self._waiting = deque(job for job in self._waiting if job.text not in gone)
            self._cancelled |= gone & self._jobs.keys()  # the thread drops them: a step may be using their rows

    def close(self) -> None:
        """Reject new texts, and end the thread after the current step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._jobs or self._closing)
                if self._closing:
                    return
                fresh = self._admit()
            # Without the lock: a prompt or a step takes seconds, and requests must be answered meanwhile.
            for job in fresh:
                self._guarded([job], lambda job=job: self._batch.add(job.text))  # type: ignore[misc]  # bound early
            if self._batch.texts:
                self._guarded(list(self._jobs.values()), self._step)

    def _admit(self) -> list[TextRequest]:
        """Remove cancelled texts, and return those that may start."""
        for text in self._cancelled:
            self._batch.drop(text)
            self._jobs.pop(text, None)
        self._cancelled.clear()
        fresh = [self._waiting.popleft() for _ in range(min(self._batch.free, len(self._waiting)))]
        self._jobs.update((job.text, job) for job in fresh)
        return fresh

    def _step(self) -> None:
        for text, new in self._batch.step():
            job = self._jobs[text]
            if text.finish:
                with self._changed:
                    del self._jobs[text]
            if new or text.finish:
                job.report(text, new)

    def _guarded(self, jobs: Sequence[TextRequest], action: Callable[[], object]) -> None:
        """Run an action for some texts. If it fails, for example for lack of memory, only these texts end."""
        try:
            action()
        # Broad, because this thread serves all requests: if it ended, each of them would wait forever. The traceback is
        # in the server's output, the clients of these texts get status 500, and the thread continues.
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            with self._changed:
                failed = [job for job in jobs if self._jobs.pop(job.text, None)]
            for job in failed:
                self._batch.drop(job.text)
                job.report(job.text, error)


if __name__ == "__main__":
    sys.exit(run_program(main))
