"""Train short real runs on the CPU and keep their validation curves: forecasts are checked with them.

    nice python bench/record_curves.py FOLDER [--write lib/kmatrix/verdict/recorded_curves.json]

FOLDER gets the results, below 1 GB, with the data in FOLDER/data; matrices that have finished there are not repeated.
36 runs of 150 to 600 steps take about 15 minutes on 2 idle cores. The curves differ in the last digits per machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib")]
from kmatrix.records.paths import matrix_dirs
from kmatrix.records.runs import (
    VALIDATION_LOSS,
    Status,
    read_result,
    read_run_file,
    read_train_values,
    validation_metrics,
)
from kmatrix.status.view.forecasts import course_of

COMMON = "NUM_GPUS=1 BATCH_SIZE=6 PARALLEL_BATCH_SIZE=6 EVAL_SAMPLES=48 LOG_INTERVAL=50"
RATES = (
    "OPTIMIZER=adamw => LEARNING_RATE=2e-3; OPTIMIZER=muon => LEARNING_RATE=0.02 MUON_ADAMW_LR=2e-3;"
    "OPTIMIZER=adam => LEARNING_RATE=1e-3; OPTIMIZER=lion => LEARNING_RATE=3e-4; OPTIMIZER=soap => LEARNING_RATE=3e-3"
)
# name -> arguments of a matrix: two optimizers with two seeds each, others, learning rates, and other lengths
MATRICES = {
    "schedules": "OPTIMIZER=adamw,muon SCHEDULE=cosine,linear,constant,wsd SEED=1,2 MAX_ITERS=300 EVAL_INTERVAL=10",
    "rates": "OPTIMIZER=adamw LEARNING_RATE=5e-4,6e-3 SCHEDULE=cosine,linear,wsd MAX_ITERS=150 EVAL_INTERVAL=5",
    "optimizers": "OPTIMIZER=adam,lion,soap SCHEDULE=cosine,constant MAX_ITERS=300 EVAL_INTERVAL=10",
    "long": "OPTIMIZER=adamw,muon SCHEDULE=cosine,constant,wsd MAX_ITERS=600 EVAL_INTERVAL=20",
    "seeds": "OPTIMIZER=adamw,muon SCHEDULE=cosine SEED=3 MAX_ITERS=300 EVAL_INTERVAL=10",
}


def train(folder: Path) -> None:
    """Run the matrices one after the other, in this folder."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}", "KCONFIG_CONFIG": str(folder / ".config")}

    def kmatrix(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "kmatrix", *arguments], cwd=ROOT, env=env, check=True)

    kmatrix("defconfig-gpt2-cpu-quick")
    for name, words in MATRICES.items():
        results = folder / name
        if list(results.glob("*/results.json")):
            continue
        places = (f"RESULTS_DIR={results}", f"DATA_DIR={folder / 'data'}", f"MATRIX_COUPLED={RATES}")
        kmatrix("test-matrix", *COMMON.split(), *words.split(), *places)


def recorded(folder: Path) -> dict[str, object]:
    """Return the validation losses of all runs in this folder as recorded_curves.json has them."""
    runs, vocabulary = [], 0
    for name in MATRICES:
        for matrix in matrix_dirs(folder / name):
            for run in matrix.runs():
                result, train = read_result(run), read_run_file(run).train
                if result is None or result.status != Status.FINISHED:
                    continue
                lines, course = validation_metrics(run.metrics), course_of(train)
                assert course is not None, run.name
                rate = read_train_values(run)["learning_rate"]
                words = [train.optimizer, f"lr{rate:g}", course.schedule, course.steps, f"seed{train.seed}"]
                losses = [round(float(line.values[VALIDATION_LOSS] or 0), 4) for line in lines]
                about = {"name": " ".join(map(str, words)), **asdict(course), "every": lines[1].step, "losses": losses}
                runs.append(about)
                vocabulary = train.vocab_size or 0
    about = f"bench/record_curves.py, {platform.machine()}, {date.today():%Y-%m}"
    return {"schema": 1, "about": about, "vocabulary": vocabulary, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path, help="file for the curves")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(arguments.folder.resolve())
    if arguments.write is not None:
        values = recorded(arguments.folder)
        runs = ",\n".join(json.dumps(run) for run in values.pop("runs"))
        head = json.dumps(values).removesuffix("}")
        arguments.write.write_text(f'{head}, "runs": [\n{runs}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
