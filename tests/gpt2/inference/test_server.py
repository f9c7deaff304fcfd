"""The inference server, used by the real openai client and by raw HTTP: responses, streams and access."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from checkpoints import best_of
from factories import ROOT, environment, make_run, train
from gpt2.data.tokenizer import load
from gpt2.inference.generate import GeneratedText, Sampling, generate
from gpt2.inference.server import listening
from gpt2.model.gpt2 import GPT
from kmatrix.errors import LaunchError
from models import enlarge_weights
from serving import SHAPE, served
from waiting import wait_until

pytestmark = pytest.mark.process

NAME = "gpt2_adamw_1cpu"
BYTES = load("byte")


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield enlarge_weights(GPT(SHAPE)).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def address(model):
    with served(model) as url:
        yield url


@pytest.fixture(scope="module")
def openai():
    """The client's package: a second to import, so not by every worker of pytest."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def generated_alone(model, prompt, **options):
    """Return the text that the model generates without a server."""
    text = GeneratedText(BYTES.encode(prompt).tolist(), Sampling(**options), BYTES)
    list(generate(model, text))
    return text.text


def post(address, body, **headers):
    """Send a raw request; return status and body."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    text = response.read()
    return response.status, json.loads(text) if response.status != 421 else text.decode()


def test_a_completion_is_the_text_generated_by_the_model(client, model):
    assert [found.id for found in client.models.list()] == [NAME]
    response = client.completions.create(model=NAME, prompt="The ", max_tokens=20, seed=5, temperature=0.7)
    (choice,) = response.choices
    assert choice.text == generated_alone(model, "The ", max_tokens=20, seed=5, temperature=0.7)
    assert choice.finish_reason in ("length", "stop")
    assert response.model == NAME
    assert (response.usage.prompt_tokens, response.usage.total_tokens - response.usage.completion_tokens) == (4, 4)


def test_a_stream_delivers_the_same_text_in_chunks(client):
    options = {"model": NAME, "prompt": "The ", "max_tokens": 30, "seed": 5}
    completion = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == completion.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_text_ends_the_text(client, model):
    text = generated_alone(model, "x", max_tokens=40, seed=3)
    stop = text[4:6]
    (choice,) = client.completions.create(model=NAME, prompt="x", max_tokens=40, seed=3, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "integer of at least 1"),
        ({"max_tokens": "5"}, "max_tokens", "is not int"),
        ({"max_tokens": True}, "max_tokens", "is not int"),
        ({"temperature": -1}, "temperature", "0 to 100"),
        ({"temperature": 10**400}, "temperature", "0 to 100"),
        ({"prompt": [1]}, "prompt", "is not str"),
        ({"prompt": "\ud800"}, "prompt", "not text"),
        ({"prompt": "x" * 90}, "max_tokens", "context is 96 tokens; the request has 90 in the prompt, 16 to generate"),
        ({"stop": ["a", 3]}, "stop", "list of texts"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stream": "yes"}, "stream", "is not bool"),
        ({"seed": 2**64}, "seed", "2^63"),
        ({"n": 1}, "n", "is not supported"),
        ({"logprobs": 3}, "logprobs", "is not supported"),
        ({"tempreature": 1}, "tempreature", "is not supported"),
        ({"model": "gpt-4"}, "model", "is not served here"),
    ],
)
def test_a_parameter_that_is_unknown_or_wrong_is_refused_by_name(address, options, param, message):
    status, response = post(address, {"model": NAME, "prompt": "a", **options})
    assert status == (404 if param == "model" else 400)
    assert response["error"]["param"] == param
    assert message in response["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_not_a_json_object_is_refused(address, body):
    assert post(address, body)[0] == 400


def test_a_web_page_can_send_no_request(address):
    assert post(address, b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert post(address, {"prompt": "a"}, Host="evil.example")[0] == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert post(address, {"prompt": "a", "max_tokens": 1}, Host=host)[0] == 200


def test_with_a_key_only_its_holder_is_served(openai, model):
    with served(model, key="secret") as url:
        for key, allowed in (("secret", True), ("Secret", False), ("none", False), ("é", False)):
            accepted = post(url, {"prompt": "a", "max_tokens": 1}, Authorization=f"Bearer {key}".encode())
            assert accepted[0] == (200 if allowed else 401)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_requests_at_the_same_time_receive_their_own_texts(client, model):
    def complete(number):
        options = {"model": NAME, "prompt": f"{number}:", "max_tokens": 12, "seed": number}
        if number % 2:
            return client.completions.create(**options).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(complete, range(6)))
    assert texts == [generated_alone(model, f"{number}:", max_tokens=12, seed=number) for number in range(6)]


class CountedModel(GPT):
    """A model that counts its tokens, and waits before each of them for a gate."""

    def __init__(self, shape):
        super().__init__(shape)
        self.gate, self.calls = threading.Event(), 0

    def extend(self, *arguments):
        self.calls += 1
        self.gate.wait(60)
        return super().extend(*arguments)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_does_not_block_the_next_one(stream):
    model = CountedModel(SHAPE)
    with served(model) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = json.dumps({"prompt": "a", "max_tokens": 90, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: model.calls == 1)
        connection.close()
        model.gate.set()
        assert post(url, {"prompt": "a", "max_tokens": 1})[0] == 200
        assert model.calls < 90


def test_a_port_in_use_or_an_invalid_one_is_reported():
    with listening("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(LaunchError, match=r"(?s)cannot listen on.*in use.*PORT=0"):
            listening("127.0.0.1", listener.getsockname()[1])
    for host, port in (("127.0.0.1", 70000), ("no such host", 0), ("203.0.113.254", 0)):  # the last: RFC 5737
        with pytest.raises(LaunchError, match="cannot listen on"):
            listening(host, port)


@pytest.mark.nightly
def test_the_program_serves_a_checkpoint_until_ctrl_c(tmp_path):
    run_dir = make_run(tmp_path)
    assert train(run_dir).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt2.inference.server", str(best_of(run_dir.path)), "--port", "0"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first_line = process.stdout.readline()
        url = first_line.split(": ")[1].split("/v1")[0]
        assert first_line.startswith("gpt2_adamw_1cpu, step 12, on cpu: http://127.0.0.1:")
        wait_until(lambda: _answers(url))
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().strip() == "stopped"
    finally:
        process.kill()


def _answers(url):
    try:
        return post(url, {"prompt": "a", "max_tokens": 1})[0] == 200
    except OSError:
        return False
