"""Write HellaSwag files in the format of its authors and in that of llm.c."""

from __future__ import annotations

import json

import numpy as np

from models import _one_thread_and_default_precision, enlarge_weights, hf_twin  # noqa: F401  (a fixture for all)

LINES = (
    {"ctx": "A man sits on a roof. he", "endings": ["pulls up tiles.", "sings", "eats a car.", "is"], "label": 0},
    {"ctx": "She cuts an onion and", "endings": ["flies.", "cries.", "turns into a lamp.", "x"], "label": 1},
    {"ctx": "Water", "endings": ["burns.", "is a colour.", "boils at 100 degrees.", "s"], "label": 2},
    {"ctx": "The dog", "endings": ["barks.", "reads.", "does a somersault.", "is blue."], "label": 0},
    {"ctx": "He opens the door and", "endings": ["a.", "bb.", "ccc.", "enters the house."], "label": 3},
)


def jsonl(folder, lines=LINES, name="hellaswag_val.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"ind": 1, **line}) + "\n" for line in lines), encoding="utf-8")
    return path


def binary(path, examples):
    """Write examples as llm.c does (dev/data/data_common.py, write_evalfile)."""
    header, stream, longest = np.zeros(256, "<i4"), [], 0
    for index, (context, endings, label) in enumerate(examples):
        record = [65535, 0, index, label, len(endings), len(context), *context]
        for ending in endings:
            record += [len(ending), *ending]
        record[1] = 2 * len(record)
        longest = max(longest, record[1])
        stream += record
    header[:4] = 20240522, 1, len(examples), longest
    path.write_bytes(header.tobytes() + np.array(stream, "<u2").tobytes())
    return path
