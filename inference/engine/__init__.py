"""Continuous batching of MiniMax-M3 requests over paged memory."""

from inference.engine.coverage import Coverage, WeightLoadError, WeightSlot
from inference.engine.engine import Engine, PauseMode, load_tokenizer
from inference.engine.loading import EngineStateError, WeightState
from inference.engine.request import FinishReason, Request, RequestOutput, SamplingParams

__all__ = [
    "Coverage",
    "Engine",
    "EngineStateError",
    "FinishReason",
    "PauseMode",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "WeightLoadError",
    "WeightSlot",
    "WeightState",
    "load_tokenizer",
]
