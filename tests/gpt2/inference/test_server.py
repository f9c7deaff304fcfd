"""The inference server, used by the real openai client and by raw HTTP: responses, streams and access."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import uvicorn

from gpt2.data.tokenizer import load
from gpt2.inference.generate import GeneratedText, Sampling, generate
from gpt2.inference.restore import Restored
from gpt2.inference.server import application, serve
from gpt2.model.gpt2 import GPT
from kmatrix.errors import LaunchError
from kmatrix.shapes import ModelShape
from models import enlarge_weights
from waiting import wait_until

pytestmark = pytest.mark.process

NAME = "gpt2_adamw_1cpu"
BYTES = load("byte")
SHAPE = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=96, vocab_size=257)


@contextmanager
def served(model: GPT, key: str | None = None) -> Iterator[str]:
    """Serve with the real server in a thread until the end of the block, and yield its address."""
    restored = Restored(model=model.eval(), tokenizer=BYTES, name=NAME, step=12)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(application(restored, key=key), log_level="warning", access_log=False, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the server has started")
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield enlarge_weights(GPT(SHAPE)).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def address(model):
    with served(model) as address:
        yield address


@pytest.fixture(scope="module")
def complete(address):
    """A completion by the real client."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60)
    assert [found.id for found in client.models.list()] == [NAME]
    return lambda prompt, **options: client.completions.create(model=NAME, prompt=prompt, **options)


def generated_alone(model, prompt, **options):
    """Return what the model generates without a server."""
    text = GeneratedText(BYTES.encode(prompt).tolist(), Sampling(**options), BYTES)
    list(generate(model, text))
    return text


def post(address, body, **headers):
    """Send a raw request; return status and body."""
    connection = http.client.HTTPConnection(address, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps({"prompt": "a", "max_tokens": 1, **body}).encode()
    connection.request("POST", "/v1/completions", data, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_a_completion_and_a_stream_are_the_text_generated_by_the_model_up_to_a_stop_text(complete, model):
    options = {"max_tokens": 20, "seed": 5, "temperature": 0.7}
    alone = generated_alone(model, "The ", **options)
    response = complete("The ", **options)
    (choice,) = response.choices
    assert (choice.text, choice.finish_reason, response.model) == (alone.text, alone.finish, NAME)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (4, len(alone.tokens))
    chunks = list(complete("The ", **options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.text
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}
    assert (chunks[-1].choices[0].finish_reason, len({chunk.id for chunk in chunks})) == (alone.finish, 1)
    stop = alone.text[4:6]
    (choice,) = complete("The ", **options, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (alone.text[: alone.text.index(stop)], "stop")


REFUSED = {
    "max_tokens: at least 1": {"max_tokens": 0},
    "max_tokens: expected int, got str": {"max_tokens": "5"},
    "temperature: 0 to 100": {"temperature": -1},
    "prompt: expected str, got array": {"prompt": [1]},
    "context is 96 tokens, it has 90 in the prompt, 16 to generate": {"prompt": "x" * 90, "max_tokens": 16},
    "stop[1]: expected str, got int": {"stop": ["a", 3]},
    "stop: texts that are not empty": {"stop": ""},
    "seed: 0 to 2^63 - 1": {"seed": 2**63},
    "unknown field logprobs": {"logprobs": 3},
    "unknown field tempreature": {"tempreature": 1},
    "gpt-4 is not served here": {"model": "gpt-4"},
}


def test_what_is_unknown_or_wrong_is_refused_by_name(address):
    for message, options in REFUSED.items():
        status, text = post(address, {"model": NAME, **options})
        assert status == 400
        assert message in json.loads(text)["error"]["message"]
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b'{"seed": ' + b"9" * 5000 + b"}"):
        status, text = post(address, body)
        assert (status, "the request is not supported" in text) == (400, True)


def test_only_requests_that_name_this_machine_and_have_the_key_are_served(address, model):
    for host, status in (("evil.example", 421), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:8000", 200)):
        assert post(address, {}, Host=host)[0] == status
    with served(model, key="secret") as locked:
        for key, status in (("secret", 200), ("Secret", 401), ("é", 401)):
            assert post(locked, {}, Authorization=f"Bearer {key}".encode())[0] == status
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"http://{locked}/v1", api_key="wrong", max_retries=0).models.list()


def test_requests_at_the_same_time_receive_their_own_texts(complete, model):
    def text(number):
        found = complete(f"{number}:", max_tokens=12, seed=number, stream=number % 2 == 0)
        return found.choices[0].text if number % 2 else "".join(chunk.choices[0].text for chunk in found)

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(text, range(6)))
    assert texts == [generated_alone(model, f"{number}:", max_tokens=12, seed=number).text for number in range(6)]


def test_a_port_in_use_or_that_cannot_be_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for port in (listener.getsockname()[1], 70000):
            with pytest.raises(LaunchError, match="cannot listen on"):
                serve(tmp_path / "none.pt", port, "")
