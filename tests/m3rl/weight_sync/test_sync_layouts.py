"""Four trainer ranks and four workers in processes, over gloo, in every pair of layouts."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from inference.parallel.config import ParallelConfig
from m3rl.weight_sync.sync import WeightSync
from m3rl.weight_sync.trainer_layout import TrainerShards
from tests.m3rl.weight_sync.layout_sides import LayoutTrainer, LayoutWorker
from tests.m3rl.weight_sync.processes import ForkedProcess
from tests.m3rl.weight_sync.sync_fakes import RemoteSenders

WAIT_S = 120.0
TRAINERS = {
    "fsdp": TrainerShards(world=4),
    "fsdp x ep2": TrainerShards(world=4, ep=2),
    "ep4": TrainerShards(world=4, ep=4),
    "hsdp x ep2": TrainerShards(world=4, replicas=2, ep=2),
    "replicated": TrainerShards(world=4, replicas=4),
}
REPLICAS = {
    "dp4 ep4": ParallelConfig(tp=1, dp=4),
    "tp2 dp2 ep4": ParallelConfig(tp=2, dp=2),
    "tp2 dp2 ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "tp4": ParallelConfig(tp=4, dp=1),
}
CASES = [(trainer, replica, "none") for trainer in TRAINERS for replica in REPLICAS]
CASES += [("fsdp", "dp4 ep4", "mxfp8"), ("ep4", "dp4 ep4", "mxfp8_released")]


class Worker:
    def __init__(self, process: ForkedProcess) -> None:
        self.attach = process.attach
        self._process = process

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._process.call("receive", method, *args)


@pytest.fixture(scope="module")
def processes():
    ranks = [ForkedProcess(LayoutTrainer, rank) for rank in range(4)]
    workers = [ForkedProcess(LayoutWorker, rank) for rank in range(4)]
    yield ranks, workers
    for process in [*ranks, *workers]:
        process.end()


def on_all(processes: list[ForkedProcess], method: str, *args: Any) -> list[Any]:
    return [f.result(WAIT_S) for f in [p.call(method, *args) for p in processes]]


@pytest.mark.parametrize(("trainer", "replica", "quantization"), CASES)
def test_after_each_optimizer_step_a_sync_is_a_load_from_disk(
    processes, trainer: str, replica: str, quantization: str
):
    ranks, workers = processes
    on_all(ranks, "shard", TRAINERS[trainer])
    on_all(workers, "split", REPLICAS[replica], quantization)
    sync = WeightSync(
        RemoteSenders(ranks),
        {0: [Worker(worker) for worker in workers]},
        pause=lambda number: None,
        resume=lambda number: None,
        host="127.0.0.1",
        timeout_s=WAIT_S,
        min_replicas=1,
        verify=True,
        chunk_bytes=4096,
    )
    sync.connect(0)
    hashes = set()
    for num_steps in (1, 2):
        on_all(ranks, "step", num_steps)
        report = sync.sync(num_steps)
        assert (report.ready, report.checksum_ok) == ((0,), True)
        assert on_all(workers, "differs_from_disk", num_steps) == [[]] * 4
        hashes.add(report.wire_hash)
    assert len(hashes) == 2
    plan = sync.plan(0)
    assert plan is not None
    sent = [sum(op.nbytes for op in plan.sends(rank)) for rank in range(4)]
    assert max(sent) <= 1.1 * sum(sent) / 4
    sync.close()
