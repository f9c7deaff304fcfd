"""The matrix directory that version 0.1 wrote, unpacked for tests; tests/fixtures/README.md describes it."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).resolve().parents[1] / "fixtures" / "version_0_1.tar.gz"
MATRIX = "test_matrix_results_20261122_074236"
FINISHED, STOPPED, PLANNED = "gpt2_adamw_1cpu", "gpt2_muon_1cpu", "gpt2_sgd_1cpu"
ORIGINAL_CHECKOUT = b"/srv/kmatrix"  # absolute paths in the archive begin with it
WITH_PATHS = {".json", ".jsonl", ".txt", ".log"}  # suffixes of text files; a checkpoint's paths are not read


def unpack(checkout: Path) -> Path:
    """Unpack matrix and dataset into a checkout, as if version 0.1 had run there. Return the matrix directory.

    Modification times are kept: they are part of the dataset's recipe.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(checkout, filter="data")
    for path in (checkout / MATRIX).rglob("*"):
        if path.is_file() and path.suffix in WITH_PATHS:
            path.write_bytes(path.read_bytes().replace(ORIGINAL_CHECKOUT, bytes(checkout)))
    return checkout / MATRIX
