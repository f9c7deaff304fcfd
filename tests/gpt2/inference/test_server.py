"""The inference server, used by the real openai client and by raw HTTP: responses, streams, limits and access."""

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
from gpt2.generate import GeneratedText, Sampling, generate
from gpt2.inference.server import MAX_BODY, Service, listening
from gpt2.model.gpt2 import GPT
from kmatrix.errors import LaunchError
from models import enlarge_weights
from serving import SHAPE, restored, served
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
    with served(Service(restored(model=model))) as url:
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


def post(address, body, *, path="/v1/completions", **headers):
    """Send a raw request; return status, headers and body."""
    host, port = address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, response.headers, json.loads(response.read() or b"null")


def test_a_completion_is_the_text_generated_by_the_model(client, model):
    response = client.completions.create(model=NAME, prompt="The ", max_tokens=20, seed=5, temperature=0.7, top_p=0.9)
    (choice,) = response.choices
    assert choice.text == generated_alone(model, "The ", max_tokens=20, seed=5, temperature=0.7, top_p=0.9)
    assert choice.finish_reason in ("length", "stop")
    assert response.model == NAME
    assert (response.usage.prompt_tokens, response.usage.total_tokens - response.usage.completion_tokens) == (4, 4)


def test_a_stream_delivers_the_same_text_in_chunks(client):
    options = {"model": NAME, "prompt": "The ", "max_tokens": 30, "seed": 5}
    completion = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == completion.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in texts[:-1]] == [None] * (len(texts) - 1)
    assert texts[-1].choices[0].finish_reason == completion.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == completion.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_prompts_and_completions_are_returned_in_order(client, model):
    options = {"model": NAME, "prompt": ["a", [98, 99]], "n": 2, "max_tokens": 6, "seed": 7}
    response = client.completions.create(**options)
    expected = [generated_alone(model, p, max_tokens=6, seed=7 + i) for i, p in enumerate(["a", "a", "bc", "bc"])]
    assert [choice.text for choice in response.choices] == expected
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.usage.prompt_tokens == 3
    streams = ["", "", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        streams[chunk.choices[0].index] += chunk.choices[0].text
    assert streams == expected


def test_echo_returns_the_prompt_first_and_stop_ends_the_text(client, model):
    text = generated_alone(model, "x", max_tokens=40, seed=3)
    stop = text[4:6]
    response = client.completions.create(model=NAME, prompt="x", max_tokens=40, seed=3, stop=stop, echo=True)
    assert response.choices[0].text == "x" + text[: text.index(stop)]
    assert response.choices[0].finish_reason == "stop"


def logprobs_by_hand(model, prompt, completion):
    """Return the log-probabilities after each token but the last of prompt and completion together: (T, V)."""
    tokens = [*prompt.encode(), *completion.encode()]
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0][0].log_softmax(-1)[:-1]


def test_logprobs_are_those_of_the_model_for_every_token(client, model):
    # The model writes random bytes: a text of one-byte characters can be computed by hand.
    options = {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9}
    seed = next(n for n in range(500) if generated_alone(model, "The ", seed=n, **options).isascii())
    (choice,) = client.completions.create(model=NAME, prompt="The ", seed=seed, logprobs=3, **options).choices
    found = choice.logprobs

    assert "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(len(choice.text)))
    expected = logprobs_by_hand(model, "The ", choice.text)[3:]
    for row, token, logprob, top in zip(
        expected, choice.text.encode(), found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        likely = row.topk(3)
        chosen = [] if token in likely.indices else [row[token].item()]  # the fourth: it is always there
        assert list(top.values()) == pytest.approx([*likely.values.tolist(), *chosen], abs=1e-4)
        assert top[chr(token)] == logprob


def test_echo_with_logprobs_scores_the_prompt_as_evaluation_programs_need_it(client, model):
    (choice,) = client.completions.create(
        model=NAME, prompt="abc", max_tokens=1, temperature=0, logprobs=1, echo=True
    ).choices
    found = choice.logprobs
    expected = logprobs_by_hand(model, "abc", "")

    assert found.tokens[:3] == ["a", "b", "c"]
    assert found.text_offset[:3] == [0, 1, 2]
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    by_hand = [expected[0, ord("b")].item(), expected[1, ord("c")].item()]
    assert found.token_logprobs[1:3] == pytest.approx(by_hand, abs=1e-4)
    assert found.text_offset[3:] in ([3], [])


def test_models_and_health_are_reported(openai, client, address):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "kmatrix"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("gpt-4")
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", "/health")
    health = json.loads(connection.getresponse().read())
    assert (health["status"], health["step"], health["model"]) == ("ok", 12, NAME)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "integer of at least 1"),
        ({"max_tokens": "5"}, "max_tokens", "expected an integer"),
        ({"max_tokens": True}, "max_tokens", "expected an integer"),
        ({"temperature": -1}, "temperature", "0 to 100"),
        ({"temperature": 10**400}, "temperature", "out of range"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 17}, "n", "at most 16"),
        ({"n": 0}, "n", "integer of at least 1"),
        ({"prompt": 3}, "prompt", "prompt must be a text"),
        ({"prompt": [300]}, "prompt", "vocabulary of 257"),
        ({"prompt": [-1]}, "prompt", "vocabulary of 257"),
        ({"prompt": ["a", 3]}, "prompt", "prompt must be a text"),
        ({"prompt": "\ud800"}, "prompt", "not text"),
        ({"prompt": "x" * 90}, "prompt", "context is 96 tokens, but the request needs 106"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": ["a", ""]}, "stop", "must not be empty"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 3}, "stream_options", "object"),
        ({"seed": -1}, "seed", "integer of at least 0"),
        ({"seed": 2**64}, "seed", "2^63"),
        ({"logprobs": 6}, "logprobs", "at most 5"),
        ({"logprobs": -1}, "logprobs", "integer of at least 0"),
        ({"logprobs": True}, "logprobs", "expected an integer"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"tempreature": 1}, "tempreature", "unknown parameter"),
        ({"model": "gpt-4"}, "model", "is not served here"),
    ],
)
def test_unsupported_parameters_are_refused_by_name_and_never_ignored(address, options, param, message):
    status, _, response = post(address, {"model": NAME, "prompt": "a", "max_tokens": 16, **options})
    assert status == (404 if param == "model" else 400)
    assert response["error"]["param"] == param
    assert message in response["error"]["message"]
    assert response["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_not_a_json_object_is_refused(address, body):
    status, _, response = post(address, body)
    assert status == 400
    assert "error" in response


def test_a_request_of_one_megabyte_is_refused_and_the_server_continues(openai, client, address):
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=NAME, prompt="x" * 2**20)
    assert error.value.status_code == 413
    status, _, response = post(address, b"x" * (MAX_BODY + 1))
    assert (status, response["error"]["code"]) == (413, "body_too_large")
    assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices


def test_only_json_is_accepted_so_that_a_web_page_cannot_send_requests(address):
    status, _, response = post(address, b"{}", **{"Content-Type": "text/plain"})
    assert (status, "application/json" in response["error"]["message"]) == (415, True)


def test_a_request_for_another_host_is_refused(address):
    assert post(address, {"prompt": "a"}, Host="evil.example")[0] == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert post(address, {"prompt": "a", "max_tokens": 1}, Host=host)[0] == 200


def test_with_a_key_only_its_holder_is_served(openai, model):
    with served(Service(restored(model=model)), key="secret") as url:
        for key, allowed in (("secret", True), ("Secret", False), ("none", False), ("é", False)):
            accepted = post(url, {"prompt": "a", "max_tokens": 1}, Authorization=f"Bearer {key}".encode())
            assert accepted[0] == (200 if allowed else 401)
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_fifty_concurrent_requests_receive_their_own_texts(client, model):
    def complete(number):
        options = {"model": NAME, "prompt": f"{number}:", "max_tokens": 12, "seed": number}
        if number % 2:
            return client.completions.create(**options).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(complete, range(50)))
    assert texts == [generated_alone(model, f"{number}:", max_tokens=12, seed=number) for number in range(50)]


class GatedModel(GPT):
    """A model that advances only when a gate allows it."""

    gate = threading.Event()

    def extend(self, *arguments):
        self.gate.wait(60)
        return super().extend(*arguments)


@pytest.fixture
def gated_service():
    """A service with one row and a queue of two, whose model waits for the gate."""
    GatedModel.gate = threading.Event()
    service = Service(restored(model=GatedModel(SHAPE)), rows=1, waiting=2)
    with served(service) as url:
        yield service, url
        GatedModel.gate.set()


def test_requests_beyond_the_queue_limit_get_429_with_retry_after(gated_service):
    service, url = gated_service
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(post, url, {"prompt": "ab", "max_tokens": 2}) for _ in range(3)]
        wait_until(lambda: service.batcher.load == (1, 2))
        status, headers, response = post(url, {"prompt": "ab", "max_tokens": 2})
        assert (status, headers["Retry-After"], response["error"]["code"]) == (429, "1", "queue_full")
        GatedModel.gate.set()
        assert [response.result()[0] for response in futures] == [200, 200, 200]
    assert service.batcher.load == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_when_the_client_disconnects(gated_service, stream):
    service, url = gated_service
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    body = json.dumps({"prompt": "ab", "max_tokens": 90, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_until(lambda: service.batcher.load == (1, 0))
    connection.close()
    GatedModel.gate.set()
    wait_until(lambda: service.batcher.load == (0, 0))


def test_a_port_in_use_or_an_invalid_one_is_reported():
    with listening("127.0.0.1", 0) as listening_socket:
        listening_socket.listen()
        with pytest.raises(LaunchError, match=r"(?s)cannot listen on.*in use.*PORT=0"):
            listening("127.0.0.1", listening_socket.getsockname()[1])
    with pytest.raises(LaunchError, match="invalid PORT=70000"):
        listening("127.0.0.1", 70000)
    for host in ("no such host", "203.0.113.254"):  # the second is for documentation, and of no machine: RFC 5737
        with pytest.raises(LaunchError, match=r"(?s)cannot listen on.*address of this machine as HOST="):
            listening(host, 0)


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
        assert post(url, {"prompt": "a", "max_tokens": 3})[0] == 200
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
