"""Small collectives in memory that two GPUs have in common, and a rank that dies in one."""

from __future__ import annotations

import os
import signal
import socket
import time
from multiprocessing import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from inference.parallel import peer_memory
from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelGroups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROWS, COLUMNS = 37, 384


def part(rank: int, step: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(10 * step + rank)
    return torch.randn(ROWS, COLUMNS, device="cuda", generator=generator).bfloat16()


def groups_of(rank: int, port: int) -> ParallelGroups:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    return ParallelGroups.create(ParallelConfig(tp=2), timeout_s=20)


def compute(rank: int, port: int, answers: Queue[Any]) -> None:
    """Sums, gathered parts and added parts, launched and replayed in turn."""
    groups = groups_of(rank, port)
    memory = groups.tp_memory
    assert memory is not None, "two GPUs of one machine reach one another"
    x = torch.zeros(ROWS, COLUMNS, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        peer_memory.all_reduce(memory, x)
    faults = []
    for step in range(6):
        both = [part(0, step), part(1, step)]
        wanted = (both[0].float() + both[1].float()).bfloat16()
        x.copy_(both[rank])
        if step % 2:
            graph.replay()
        else:
            peer_memory.all_reduce(memory, x)
        (seen,) = peer_memory.gather(memory, [both[rank]])
        y = torch.ones_like(x)
        peer_memory.add_parts(memory, torch.cat([both[rank], 2 * both[rank]]), y)
        added = ((1 + rank) * (both[0].float() + both[1].float()) + 1).bfloat16()
        pairs = {"sum": (x, wanted), "gather": (seen, torch.cat(both)), "add": (y, added)}
        faults += [f"{name} {step}" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    answers.put((rank, faults))
    groups.close()
    dist.destroy_process_group()


def die(rank: int, port: int, answers: Queue[Any]) -> None:
    """Rank 1 is killed; rank 0 waits for it in a replayed graph."""
    groups = groups_of(rank, port)
    x = torch.zeros(ROWS, COLUMNS, device="cuda").bfloat16()
    groups.all_reduce(x).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        groups.all_reduce(x).wait()
    dist.barrier(groups.host_group)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        graph.replay()
        groups.wait_for_device(torch.cuda.current_stream().record_event(), "step")
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - begin))
        answers.close()
        answers.join_thread()
        groups.close(error)
    os._exit(0)


def run(function: Any, num_answers: int) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").Queue()
    context = mp.start_processes(
        function, (port, answers), nprocs=2, join=False, start_method="spawn"
    )
    assert context is not None, "not joined"
    try:
        return sorted(answers.get(timeout=60) for _ in range(num_answers))
    finally:
        for process in context.processes:
            process.join(20)
            process.kill()


def test_both_ranks_compute_the_same_bits_launched_and_replayed():
    assert run(compute, 2) == [(0, []), (1, [])]


def test_a_rank_killed_amid_a_replayed_graph_is_named():
    ((_, said, seconds),) = run(die, 1)
    assert said == (
        "ParallelError: rank 0: step was not completed: rank 1 is gone, the process ended"
    )
    assert seconds < 10
