"""Deltas, and tensors that the trainer quantises, between processes with their weights on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import weight_delta
from benchmarks.kernels.harness import Bench
from benchmarks.weight_sync import Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
CASES = [
    pytest.param(["cuda:0", "cuda:1"], "nccl", marks=needs_two),
    pytest.param(["cuda:0", "cuda:0"], "gloo", id="one GPU, through pinned memory"),
]


@pytest.mark.parametrize(("devices", "backend"), CASES)
@pytest.mark.parametrize("quantization", ["none", "mxfp8"])
def test_an_optimizers_steps_travel_as_deltas(quantization, devices, backend, tmp_path: Path):
    """Which asserts that every bit is the trainer's, and how many bytes a delta has."""
    weight_delta.measure(Bench(300, tmp_path), quantization, devices, backend)


@pytest.mark.parametrize(("devices", "backend"), CASES)
def test_what_the_trainer_quantised_is_what_the_replica_would_have_made(
    devices, backend, tmp_path: Path
):
    pair = Pair(Bench(300, tmp_path), "mxfp8", devices, backend, is_small=True, timeout_s=10)
    try:
        sync = pair.driver(verify=True, chunk_bytes=64 << 10, wire="mxfp8")
        for version in (1, 2, 3):
            pair.step()
            assert sync.sync(version).checksum_ok
            assert pair.num_differing() == 0
        sync.close()
    finally:
        pair.end()
