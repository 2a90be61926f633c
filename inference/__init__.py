"""The MiniMax-M3 inference runtime, usable alone: `from inference import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.engine.request import SamplingParams
    from inference.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import torch with the first use of a name, so that `import inference.config` is instant."""
    if name == "LLM":
        from inference.llm import LLM

        return LLM
    if name == "SamplingParams":
        from inference.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'inference' has no attribute {name!r}")
