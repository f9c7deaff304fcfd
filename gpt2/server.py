"""A checkpoint behind OpenAI's completions API: /v1/completions with streaming, /v1/models, /health.

python -m gpt2.server CHECKPOINT --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt2.batcher import Batcher, BusyError
from gpt2.completions import Answer, RefusedError, Request, choice, parse, usage
from gpt2.generate import Text
from gpt2.restore import Restored, restore
from kmatrix.errors import KmatrixError, LaunchError

MOST_BODY = 256 * 1024  # bytes of a request
ROWS, WAITING = 8, 64  # texts that are written together, and that wait for it
SLOWEST_BODY_S = 15.0  # a client that sends nothing for so long is let go
GRACE_S = 5  # of answers that are on their way, after Ctrl+C
RETRY_S = 1
KEY = "KMATRIX_API_KEY"  # in the environment: who asks must know it
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Event = tuple[int, str | Exception, str | None]  # number of a text, what it says more, its finish


class Service:
    """The routes, over one model."""

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
        events = self._write(texts)
        answer = Answer.new(self.restored.name)
        if request.stream:
            lines = streamed(answer, request, texts, self._events(texts, events))
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async for _, _, _ in self._events(texts, events, http):
            pass
        choices = [
            choice(number, (request.words[number // request.n] if request.echo else "") + text.text, text.finish)
            for number, text in enumerate(texts)
        ]
        return JSONResponse(answer.part(choices, usage=usage(texts, request.n)))

    def _write(self, texts: Sequence[Text]) -> asyncio.Queue[Event]:
        """Have texts written, and return where their events arrive."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        numbers = {text: number for number, text in enumerate(texts)}

        def tell(text: Text, said: str | Exception) -> None:
            event = (numbers[text], said, text.finish)
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the server has ended meanwhile
                self.batcher.cancel(texts)

        try:
            self.batcher.submit(texts, tell)
        except BusyError:
            message = "as many texts are being written and wait as may: try again"
            raise RefusedError(message, status=429, code="queue_full") from None
        return events

    async def _events(
        self, texts: Sequence[Text], events: asyncio.Queue[Event], http: HttpRequest | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield events until every text has ended; leave the texts off where nobody waits for them any more."""
        going = len(texts)
        try:
            while going:
                try:
                    event = await asyncio.wait_for(events.get(), 0.5)
                except TimeoutError:
                    if http and await http.is_disconnected():
                        return
                    continue
                if isinstance(event[1], Exception):
                    raise RefusedError("the model failed; the server's output says why", status=500)
                going -= event[2] is not None
                yield event
        finally:
            self.batcher.cancel(texts)


async def streamed(
    answer: Answer, request: Request, texts: Sequence[Text], events: AsyncGenerator[Event, None]
) -> AsyncIterator[str]:
    """Yield an answer as server-sent events, with `[DONE]` for the last."""
    try:
        if request.echo:
            for number in range(len(texts)):
                yield line(answer.part([choice(number, request.words[number // request.n], None)]))
        async with aclosing(events):
            async for number, said, finish in events:
                yield line(answer.part([choice(number, str(said), finish)]))
        if request.usage:
            yield line(answer.part([], usage=usage(texts, request.n)))
    except RefusedError as error:  # the answer has begun: its status cannot be another any more
        yield line(error.body())
        return
    yield "data: [DONE]\n\n"


def line(value: Any) -> str:
    """Return a value as one server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def read_body(request: HttpRequest) -> bytes:
    """Return the body of a request. Raises RefusedError where it is too large, too slow or of another kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError("the body must be application/json", status=415)
    too_large = RefusedError(f"the body has more than {MOST_BODY} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    raise too_large
    except TimeoutError:
        raise RefusedError("the body did not arrive in time", status=408) from None
    return bytes(body)


class Guard:
    """Lets through who may ask: on the loopback only names of this machine, and who knows the key where one is set.

    A page in a browser that has its own name point at this machine sends that name as Host, and is refused.
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
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if self.hosts and name.strip("[]").lower() not in self.hosts:
            return RefusedError(f"this server is not {name}", status=421)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
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
    return error_answer(RefusedError(f"{request.method} {request.url.path}: there is no such thing", status=status))


def application(service: Service, *, hosts: Sequence[str] = LOOPBACK, key: str | None = None) -> ASGIApp:
    """Return the ASGI application. hosts: names that a request may have for this server; none: any."""

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
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), hosts=hosts, key=key)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.server", description="Serve a checkpoint's model.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="")
    args = parser.parse_args(argv)
    try:
        with listening(args.host, args.port) as place:
            serve(restore(args.checkpoint, args.device), place, args.host)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def listening(host: str, port: int) -> socket.socket:
    """Return a socket at this address, taken before the model is read. Raises LaunchError where it is not to be had."""
    if not 0 <= port < 65536:
        raise LaunchError(f"PORT={port} is no port", fix="a number up to 65535; 0 takes one that is free")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        place = socket.socket(family, socket.SOCK_STREAM)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
    except OSError as error:
        raise LaunchError(
            f"no server can listen at {host}, port {port}",
            why=error.strerror or str(error),
            fix="pass another PORT=, or PORT=0 for one that is free",
        ) from None
    return place


def serve(restored: Restored, place: socket.socket, host: str) -> None:
    """Answer until Ctrl+C; answers on their way then have GRACE_S seconds."""
    key = os.environ.get(KEY) or None
    local = host in LOOPBACK
    if not local and not key:
        print(f"warning: whoever reaches {host} may ask: set {KEY} in the environment", file=sys.stderr)
    app = application(Service(restored), hosts=LOOPBACK if local else (), key=key)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{place.getsockname()[1]}"
    device = next(restored.model.parameters()).device.type
    print(f"{restored.name}, step {restored.step}, on {device}: {url}/v1 (OpenAI's completions); Ctrl+C ends it")
    body = f'{{"model": "{restored.name}", "prompt": "The ", "max_tokens": 32}}'
    print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, server_header=False, ws="none"
    )
    uvicorn.Server(config).run(sockets=[place])


if __name__ == "__main__":
    sys.exit(main())
