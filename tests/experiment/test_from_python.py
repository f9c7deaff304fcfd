"""The example of the page From Python plans a matrix."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kmatrix.errors import KmatrixError
from kmatrix.experiment.configure import text_of_config
from kmatrix.experiment.plan import plan_matrix
from pages import DOCS, ROOT, fenced_blocks
from programs import Program

PAGE = DOCS / "from-python.md"


def test_the_example_of_the_page_plans_two_runs_on_the_cpu(capsys):
    first = fenced_blocks(PAGE, "python")[0]
    lines, _, rest = first.partition("matrix = make_matrix(plan)")
    assert rest
    values: dict[str, object] = {}
    exec(compile(lines, str(PAGE), "exec"), values)
    plan = values["plan"]
    assert [run.name for run in plan.runs] == ["gpt2_adamw_1cpu", "gpt2_muon_1cpu"]
    assert capsys.readouterr().out.startswith("[('gpt2_adamw_1cpu', 1")


def test_a_plan_from_python_has_the_same_runs_as_the_command_line(tmp_path):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick")
    expected_plan = program.plan("OPTIMIZER=sgd,muon", "SEED=1,2", "COMPILE=n", "MAX_TIME=1h", "NUM_GPUS=1")
    plan = plan_matrix(
        "gpt2-cpu-quick", OPTIMIZER=["sgd", "muon"], SEED=(1, 2), COMPILE=False, MAX_TIME="1h", NUM_GPUS=1
    )
    runs, expected_runs = (
        [(run.run_id, run.name, run.config) for run in each_plan.runs] for each_plan in (plan, expected_plan)
    )
    assert runs == expected_runs
    assert plan.overrides == expected_plan.overrides
    assert text_of_config(plan.tree, plan.lines) == program.config.read_text()


def test_an_error_is_an_exception_with_its_hint():
    with pytest.raises(KmatrixError, match="unknown defconfig gpt2-cpu-quik"):
        plan_matrix("gpt2-cpu-quik")
    with pytest.raises(KmatrixError, match="did you mean MAX_ITERS"):
        plan_matrix("gpt2-cpu-quick", MAX_ITER=10)


@pytest.mark.process
def test_configuration_targets_load_nothing_that_they_do_not_need():
    """They must respond within 150 ms."""
    code = "import kmatrix.cli.configure, sys; print(*sorted(sys.modules))"
    environment = {"PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    slow = {"torch", "numpy", "matplotlib", "rich", "asyncio", "kmatrix.experiment.plan", "subprocess", "socket"}
    assert not slow & set(done.stdout.split())
