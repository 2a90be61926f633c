"""Rewards with the faults that users' rewards have."""

import time
import zlib


def always_raises(payload: dict, text: str) -> float:
    raise RuntimeError("this reward is broken on purpose")


def sometimes(payload: dict, text: str) -> float:
    """In four classes, by prompt and completion: fine, raising, NaN, hanging."""
    kind = zlib.crc32(f"{payload['answer']} {text}".encode()) % 4
    if kind == 1:
        raise RuntimeError("this answer is not for me")
    if kind == 2:
        return float("nan")
    if kind == 3:
        time.sleep(3600)
    return float(len(text)) / 16
