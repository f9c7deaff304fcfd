"""Serve a checkpoint, one request at a time, with OpenAI's completions API: /v1/completions and /v1/models.

python -m gpt2.inference.server CHECKPOINT --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gpt2.inference.generate import GeneratedText, Sampling, generate
from gpt2.inference.restore import Restored, restore
from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.hosts import LOOPBACK, AsgiApp, guarded_asgi, server_address
from kmatrix.output import run_program

KEY = "KMATRIX_API_KEY"  # environment variable with the required API key
GRACE_S = 5  # for the response in progress after Ctrl+C
DEFAULT_TOKENS = 16  # as in OpenAI's API
PARAMETERS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "prompt": (str,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "stop": (str, list),
    "seed": (int,),
    "stream": (bool,),
}


class RefusedError(Exception):
    """A rejected request. param: the parameter that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}


def parse(body: bytes, restored: Restored) -> tuple[GeneratedText, bool]:
    """Return the text to generate, and whether it is streamed. Raises RefusedError; no parameter is ignored."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RefusedError("the body is not a JSON object")
    for name, value in values.items():
        if name not in PARAMETERS:
            raise RefusedError(f"{name} is not supported: the parameters are {', '.join(PARAMETERS)}", name)
        if value is not None and type(value) not in PARAMETERS[name]:  # not isinstance: true is an int in Python
            raise RefusedError(f"{name} is not {' or '.join(kind.__name__ for kind in PARAMETERS[name])}", name)
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("model", restored.name) != restored.name:
        raise RefusedError(f"{given['model']} is not served here; the model is {restored.name}", "model", status=404)
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in stop):
        raise RefusedError("stop is not a list of texts", "stop")
    try:
        prompt = restored.tokenizer.encode(given.get("prompt", "")).tolist()
    except (KmatrixError, UnicodeError) as error:
        raise RefusedError(error.what if isinstance(error, KmatrixError) else "not text", "prompt") from None
    try:
        sampling = Sampling(
            max_tokens=given.get("max_tokens", DEFAULT_TOKENS),
            temperature=given.get("temperature", 1.0),
            seed=given.get("seed", secrets.randbits(63)),
            stop=tuple(stop),
        )
    except KmatrixError as error:
        raise RefusedError(f"{error.what}: {error.why}", error.what.partition(" ")[0]) from None
    # As OpenAI's API does: the generator would continue from the last half of the context, which changes the text.
    text, context = GeneratedText(prompt, sampling, restored.tokenizer), restored.model.shape.block_size
    if len(text.prompt) + sampling.max_tokens > context:
        sizes = f"{len(text.prompt)} in the prompt, {sampling.max_tokens} to generate"
        raise RefusedError(f"the model's context is {context} tokens; the request has {sizes}", "max_tokens")
    return text, given.get("stream", False)


def application(restored: Restored, *, hosts: Sequence[str] = LOOPBACK, key: str | None = None) -> AsgiApp:
    """Return the ASGI application. hosts: accepted names of this server; (): any.  key: that requests must have."""
    created, turn = int(time.time()), asyncio.Lock()

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # compare_digest takes the same time for any wrong key: == would tell how many characters are right.
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise RefusedError("the key is missing or wrong", status=401)

    async def models(request: Request) -> Response:
        check(request)
        about = {"id": restored.name, "object": "model", "created": created, "owned_by": "kmatrix"}
        return JSONResponse({"object": "list", "data": [about]})

    async def parts(text: GeneratedText) -> AsyncIterator[str]:
        async with turn:
            tokens = generate(restored.model, text)
            while (new := await run_in_threadpool(next, tokens, None)) is not None:
                yield new

    async def completions(request: Request) -> Response:
        check(request)
        # Another type would let a web page send requests: a browser asks for permission to send this one.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise RefusedError("the body must be application/json", status=415)
        text, stream = parse(await request.body(), restored)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        head["model"] = restored.name

        def choices(new: str) -> dict[str, Any]:
            return {**head, "choices": [{"index": 0, "text": new, "logprobs": None, "finish_reason": text.finish}]}

        async def events() -> AsyncIterator[str]:
            async for new in parts(text):
                if new or text.finish:
                    yield f"data: {json.dumps(choices(new))}\n\n"
            yield "data: [DONE]\n\n"

        if stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        async for _ in parts(text):
            if await request.is_disconnected():
                break
        sizes = {"prompt_tokens": len(text.prompt), "completion_tokens": len(text.tokens)}
        return JSONResponse({**choices(text.text), "usage": {**sizes, "total_tokens": sum(sizes.values())}})

    async def refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001  (the signature of a handler)
        assert isinstance(error, RefusedError)
        return JSONResponse(error.body, error.status)

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    # Outermost: a web page cannot let a name of its own point to this server.
    return guarded_asgi(Starlette(routes=routes, exception_handlers={RefusedError: refuse}), hosts)


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket, bound before the model is loaded. Raises LaunchError if that fails."""
    try:
        address = server_address(host).address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        # A restarted server can bind while connections of the previous one are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "pass another PORT=, or PORT=0 for a free one; HOST= is an address of this machine"
        raise LaunchError(f"cannot listen on {host}, port {port}", why=why, hint=hint) from None
    return listener


def serve(restored: Restored, listener: socket.socket, host: str) -> None:
    """Serve until Ctrl+C. The response in progress then has GRACE_S seconds. host: the address, as it was written."""
    key = os.environ.get(KEY) or None
    address = server_address(listener.getsockname()[0])  # the one that is bound
    if address.is_open and not key:
        print(f"warning: {address.address} is open to everyone: set {KEY} in the environment", file=sys.stderr)
    url = f"http://{address.url_host}:{listener.getsockname()[1]}"
    device = next(restored.model.parameters()).device.type
    print(f"{restored.name}, step {restored.step}, on {device}: {url}/v1 (OpenAI's completions API); Ctrl+C stops it")
    print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{{\"prompt\": \"The \"}}'", flush=True)
    hosts = () if address.is_open else (*address.names, host.lower())
    # No log of requests: what others send does not reach the terminal.
    app = application(restored, hosts=hosts, key=key)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, server_header=False, ws="none"
    )
    uvicorn.Server(config).run(sockets=[listener])


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


if __name__ == "__main__":
    sys.exit(run_program(main))
