"""Stories do what a user does, in clones."""

from __future__ import annotations

from clones import background, clone, module_clone, pristine, program  # noqa: F401
from scripted_story import story  # noqa: F401
