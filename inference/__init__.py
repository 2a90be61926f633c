"""The MiniMax-M3 inference runtime, usable alone: `from inference import LLM, SamplingParams`."""
