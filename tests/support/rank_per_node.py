"""Train with one rank on each node: each process has the environment that torchrun gives it there."""

from __future__ import annotations

import os
import runpy

os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
runpy.run_module("gpt2.train", run_name="__main__", alter_sys=True)
