"""`make gpu-exporter` serves metrics of simulated GPUs to Prometheus, and to nobody else."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ports import held_port
from story import kill, processes_below
from waiting import wait_until

pytestmark = pytest.mark.story


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read().decode()


def is_up(port: int) -> bool:
    try:
        return "DCGM_FI_DEV_GPU_UTIL" in get(port)
    except OSError:
        return False


def test_the_exporter_is_scraped_refuses_strangers_and_ends_with_its_processes(clone):
    with held_port() as port:
        command = ["make", "--no-print-directory", "gpu-exporter", "SIMULATE=2", f"PORT={port}"]
        process = subprocess.Popen(
            command, cwd=clone.root, env=clone.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: is_up(port), "it is up")
            families = {family.name: family for family in text_string_to_metric_families(get(port))}
            assert {one.labels["gpu"] for one in families["DCGM_FI_DEV_GPU_UTIL"].samples} == {"0", "1"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == 421
            again = clone.refused("gpu-exporter", "SIMULATE=2", f"PORT={port}")
            assert re.search(rf"error: cannot serve metrics on port {port}", again)
            # A client that sends nothing must not block the others.
            with socket.create_connection(("127.0.0.1", port)):
                assert "DCGM_FI_DEV_GPU_UTIL" in get(port)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            process.wait()
            _, left = psutil.wait_procs(below, timeout=60)
            assert left == []
        finally:
            process.kill()
            kill(processes_below(clone.root))
