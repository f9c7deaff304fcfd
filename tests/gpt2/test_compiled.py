"""A compiled run: one graph per pass, of constant sizes, with and without DDP; the numbers of an eager run."""

from __future__ import annotations

import json

import pytest

import forked
from factories import environment, make_run, ranks_of, trainer
from kmatrix.records.files import read_json

pytestmark = pytest.mark.nightly  # graphs take seconds each; the mode of the compiler: test_precisions.py
COUNTED = ("tests/support/counted_graphs.py",)
NANOCHAT = {
    **{"n_kv_head": 1, "value_embeddings": True, "smear": True, "backout": True, "residual_scales": True},
    **{"window_pattern": "SL", "qk_scale": 1.2, "logit_softcap": 15.0, "norm": "rms", "activation": "relu2"},
}
OF_NANOCHAT = {"bias": False, "weight_tying": False, **NANOCHAT}
ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat", **OF_NANOCHAT},
    "nanochat2025": {
        "arch": "nanochat2025",
        **OF_NANOCHAT,
        **{"n_kv_head": 0, "value_embeddings": False, "smear": False, "backout": False, "residual_scales": False},
    },
}
# Evaluations of 10 sequences in micro-batches of 4: the last one has 2. Training continues after each.
RUN = {"compile": True, "compile_mode": "default", "eval_interval": 2, "max_iters": 6, "checkpoint_interval": 2}
SAMPLES = {"sample_interval": 2, "sample_prompt": "a"}
ONE_EACH = ["backward", "evaluation", "forward"]


def run_counted(run_dir, graphs, *arguments):
    """Train a run with the compiler that counts, and return the graphs of each rank."""
    variables = {**environment(), "GRAPHS": str(graphs)}
    process = forked.start([*trainer(run_dir, program=COUNTED), *arguments], variables, ranks=ranks_of(run_dir))
    output = "".join(process.communicate())
    assert process.returncode == 0, output
    files = [graphs.with_name(f"{graphs.name}.{rank}") for rank in range(ranks_of(run_dir))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_run_and_its_continuation_have_one_graph_per_pass_without_symbolic_sizes(tmp_path, arch, ranks):
    run_dir = make_run(tmp_path, **RUN, **SAMPLES, **ARCHITECTURES[arch], num_gpus=ranks)
    for part in ((), ("--resume", str(run_dir.checkpoints / "step_00000002.pt"))):
        for graphs in run_counted(run_dir, tmp_path / f"part-{len(part)}", *part):
            assert sorted(graph["pass"] for graph in graphs) == ONE_EACH
            assert [graph["symbolic"] for graph in graphs] == [[], [], []]


BF16 = {"dtype": "bf16"}
OPTIONS = [
    {"dropout": 0.1},
    {"recompute": True},
    *({**BF16, **more} for more in ({}, {"bf16_stream": True}, {"fp8": True, "n_embd": 64, "block_size": 64})),
    {"deterministic": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_the_model_do_not_add_graphs(tmp_path, options):
    run_dir = make_run(tmp_path, **RUN, **options)
    (graphs,) = run_counted(run_dir, tmp_path / "graphs")
    assert sorted(graph["pass"] for graph in graphs) == ONE_EACH


@pytest.mark.parametrize("rows", [64, 10])
def test_a_chunked_loss_is_one_node_of_the_graph(tmp_path, rows):
    (graphs,) = run_counted(make_run(tmp_path, **RUN, loss_chunk=rows), tmp_path / "graphs")
    of_model = [graph for graph in graphs if graph["names"] or graph["pass"] == "backward"]
    assert sorted(graph["pass"] for graph in of_model) == ONE_EACH
    assert {name for graph in graphs for name in graph["names"]} == {
        "kmatrix.loss_and_gradients.default",
        "kmatrix.loss_alone.default",
    }
    # The rest of the operator is compiled for a chunk, and for the last one if that is shorter; once more in step 2,
    # in which PyTorch's dispatcher marks the tensors in another way.
    assert len(graphs) - len(of_model) <= 2 * (1 if rows == 64 else 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"eval_samples": 3}, {"loss_chunk": 20}],
)
def test_a_last_micro_batch_that_is_filled_up_does_not_change_the_loss(tmp_path, options):
    eager = make_run(tmp_path, "eager", **options)
    filled = make_run(tmp_path, "filled", **options, compile=True, compile_mode="default")
    assert forked.start(trainer(eager), environment()).communicate()
    run_counted(filled, tmp_path / "graphs")
    first, second = (read_json(run.result) for run in (eager, filled))
    assert second["initial_val_loss"] == pytest.approx(first["initial_val_loss"], abs=1e-6)
    assert second["final_val_loss"] == pytest.approx(first["final_val_loss"], abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_stay_in_their_memory_are_the_same(tmp_path, ranks):
    """CUDA graphs need it (gpt2.model.compiled.keep_gradients); the CPU has none, and shows the numbers."""
    losses = []
    for mode in ("default", "reduce_overhead"):
        options = {**RUN, "compile_mode": mode, "num_gpus": ranks, "batch_size": 2, "gradient_accumulation": 2}
        for stage in (0, 1):
            run_dir = make_run(tmp_path, f"{mode}_{stage}", **options, zero_stage=stage)
            run_counted(run_dir, tmp_path / f"graphs_{mode}_{stage}")
            losses.append(read_json(run_dir.result)["final_val_loss"])
    assert len(set(losses)) == 1
