"""The exporter for Prometheus: accepted by promtool, scraped while runs start and end, and asked by the dashboard."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_stage import background_process, on_gpus, scenario
from skips import require_program
from waiting import wait_until

pytestmark = pytest.mark.nightly
SCRAPES = 1000
HOPPER = (
    *("0 * smact 91", "0 * tensor 55", "0 * dram 48", "0 * memtemp 71", "0 * nvlink_tx 80000"),
    *("0 * nvlink_rx 80000", "0 * energy 100"),
)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return response.read().decode()


def is_up(port):
    try:
        return "kmatrix_exporter_samples_total" in get(port)
    except OSError:
        return False


@contextmanager
def exporter(clone, scenario_path, *arguments):
    """Run the exporter on simulated GPUs; yield its port and its process."""
    port = free_port()
    command = (clone.python, "-m", "kmatrix.gputop.exporter", "--port", str(port), *arguments)
    with background_process(clone, *on_gpus(clone, scenario_path, *command)) as process:
        wait_until(lambda: is_up(port), "it is up")
        yield port, process


def values(text):
    """Return series -> value of a scrape, and check that no series is there twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            key = (one.name, tuple(sorted(one.labels.items())))
            assert key not in found, key
            found[key] = one.value
    return found


def test_promtool_accepts_the_metrics(clone, tmp_path):
    promtool = require_program("promtool")
    with exporter(clone, scenario(tmp_path, "gpus 2", *HOPPER)) as (port, _):
        wait_until(lambda: "DCGM_FI_PROF_SM_ACTIVE" in get(port), "means are known")
        done = subprocess.run(
            [str(promtool), "check", "metrics"], input=get(port), capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@contextmanager
def rank(folder, run):
    """Start a process with the command line of a rank of a run."""
    (folder / "gpt2").mkdir(exist_ok=True)
    # A package, not a bare folder: those of PYTHONPATH would be found first.
    (folder / "gpt2" / "__init__.py").touch()
    (folder / "gpt2" / "train.py").write_text("import time; time.sleep(3600)")
    command = ["python3", "-m", "gpt2.train", str(folder / run), "--attempt", "1"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_thousand_scrapes_while_runs_start_and_end(clone, tmp_path):
    """The driver is scripted: processes of two runs come and go, and a GPU is lost and found, again and again."""
    with rank(tmp_path, "run_a") as first, rank(tmp_path, "run_b") as second:
        lines = []
        for second_of in range(0, 3000, 4):
            lines += [f"{second_of} 0 process {first.pid} 1000", f"{second_of + 2} 0 process {first.pid} 0"]
            lines += [f"{second_of + 1} 1 process {second.pid} 500", f"{second_of + 3} 1 process {second.pid} 0"]
        for second_of in range(2, 3000, 12):
            lines += [f"{second_of} 2 all !lost", f"{second_of + 6} 2 all ok"]
            lines += [f"{second_of} 1 throttle thermal", f"{second_of + 3} 1 throttle none"]
        scenario_path = scenario(tmp_path, "gpus 3", *HOPPER, *lines)
        with exporter(clone, scenario_path, "--interval", "0.05") as (port, process):
            wait_until(lambda: "DCGM_FI_PROF_SM_ACTIVE" in get(port), "means are known")
            inner = psutil.Process(process.pid)
            before, memory, runs, lost = {}, [], set(), set()
            scrapes, deadline = 0, time.monotonic() + 900
            # At least a thousand, and until everything was seen, however fast this machine is.
            while (scrapes < SCRAPES or len(runs) < 3 or len(lost) < 2) and time.monotonic() < deadline:
                found = values(get(port))
                counters = {key: value for key, value in found.items() if key[0].endswith("_total")}
                for key, value in counters.items():
                    assert value >= before.get(key, 0.0), f"{key} fell"
                before |= counters
                runs |= {dict(labels)["run"] for name, labels in found if name == "kmatrix_gpu_info"}
                lost |= {value for (name, _), value in found.items() if name == "kmatrix_gpu_lost"}
                assert sum(name == "kmatrix_gpu_lost" for name, _ in found) == 3, "a lost GPU is still there"
                scrapes += 1
                if scrapes % 100 == 0:
                    memory.append(inner.memory_info().rss)
            assert scrapes >= SCRAPES
            assert runs == {"", "run_a", "run_b"}
            assert lost == {0.0, 1.0}
            assert memory[-1] < memory[0] + 8 * 2**20, memory
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_every_query_of_the_dashboard_has_an_answer(clone, tmp_path):
    prometheus = require_program("prometheus")
    board = json.loads((clone.root / "docs" / "grafana" / "kmatrix-gpus.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    run = tmp_path / "run_a"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"schema": 1, "train": {"max_iters": 100}}))
    (run / "gpu_summary.json").write_text(json.dumps({"schema": 1, "totals": {"joules": 5000.0}}))
    line = {"schema": 1, "attempt": 1, "train/loss": 3.5, "throughput/tokens_per_s": 1e5, "throughput/mfu": 0.4}
    steps = (json.dumps({**line, "step": step, "time": time.time(), "throughput/step_ms": 1e3}) for step in range(5))
    (run / "metrics.jsonl").write_text("".join(f"{text}\n" for text in steps))
    with rank(tmp_path, "run_a") as process:
        scenario_path = scenario(tmp_path, "gpus 2", *HOPPER, f"0 0 process {process.pid} 900", "0 1 throttle thermal")
        with exporter(clone, scenario_path, "--interval", "0.2") as (port, _):
            wait_until(lambda: "kmatrix_run_loss_nats" in get(port), "the run is read")
            mine = free_port()
            config = tmp_path / "prometheus.yml"
            target = f'[{{"targets": ["127.0.0.1:{port}"]}}]'
            config.write_text(
                "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
                f"scrape_configs: [{{job_name: gpus, static_configs: {target}}}]\n"
            )
            words = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
            words.append(f"--web.listen-address=127.0.0.1:{mine}")
            server = subprocess.Popen([str(prometheus), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                for query in asked:
                    text = filled(query, run=".*")
                    wait_until(lambda text=text: answer(mine, text), f"there is an answer to {text}")
                of_gpus = [query for query in asked if query.startswith("DCGM_FI_DEV_GPU_UTIL{")]
                of_gpus += [query for query in asked if "throttled" in query]
                assert len(of_gpus) == 2
                for query in of_gpus:
                    assert gpus(mine, query, run=".*") == {"0", "1"}
                    assert gpus(mine, query, run="run_a") == {"0"}
                    assert gpus(mine, query, run="run_b") == set()
            finally:
                server.kill()
                server.wait()


def filled(query, *, run):
    """Return a query as Grafana sends it: all GPUs of all hosts, and these runs."""
    text = query.replace("$__rate_interval", "30s").replace("$run", run)
    return re.sub(r"\$(host|gpu)", ".*", text)


def gpus(port, query, *, run):
    return {one["metric"]["gpu"] for one in answer(port, filled(query, run=run))}


def answer(port, query):
    """Return the result of a query, empty if Prometheus has none yet."""
    try:
        found = json.loads(get(port, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    except OSError:
        return []
    assert found["status"] == "success"
    return found["data"]["result"]
