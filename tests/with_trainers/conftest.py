"""Tests of published trainers: `make test-trainers` runs them; without trl, say, they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
