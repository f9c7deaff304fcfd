"""Nightly tests may be random, long, or need programs that few machines have."""

from __future__ import annotations

from clones import background, clone, module_clone, pristine, program  # noqa: F401
