"""Options that ``%distributed config`` has set in this notebook, for cells and launches to come."""

from __future__ import annotations

from typing import Any

SESSION_DEFAULTS: dict[str, Any] = {}
"""By the names that they have as arguments."""
