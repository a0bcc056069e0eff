"""Run files (TOML): settings in tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from thinwire.files import contents, parsed


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings by name, and by name the table that each stands in ("" for none). Raises `OSError`, `ValueError`."""
    settings: dict[str, Any] = {}
    table_of: dict[str, str] = {}
    for name, value in parsed(tomllib.loads, contents(path)).items():
        for key, one in value.items() if isinstance(value, dict) else [(name, value)]:
            if key in settings:
                raise ValueError(f"{key} is given twice")
            settings[key], table_of[key] = one, name if isinstance(value, dict) else ""
    return settings, table_of
