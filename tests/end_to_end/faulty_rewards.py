"""Rewards with the faults that users' rewards have."""

import time


def always_raises(payload: dict, text: str) -> float:
    raise RuntimeError("this reward is broken on purpose")


def sometimes(payload: dict, text: str) -> float:
    """By the answer's last letter in four classes: fine, raising, NaN, hanging."""
    kind = ord(payload["answer"][-1]) % 8
    if kind == 1:
        raise RuntimeError("this answer is not for me")
    if kind == 3:
        return float("nan")
    if kind == 5 and text.startswith(("a", "e", "s")):
        time.sleep(3600)
    return float(len(text)) / 16
