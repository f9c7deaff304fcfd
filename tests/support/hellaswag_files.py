"""Write HellaSwag files in the format of its authors."""

from __future__ import annotations

import json

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
