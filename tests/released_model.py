"""The config.json of the MiniMax-M3 release, from the public inventory of its checkpoint."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "configs" / "models" / "minimax_m3"


def released_config() -> dict[str, Any]:
    """A fresh copy."""
    config: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return config
