"""Ray: started once, quietly, offline; every worker process gets its own resources and thread
limit."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

# Read by Ray at import: no usage report, no token prompt on a machine without network.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray runs workers at niceness 15; ours are the job, and starve beside any other load.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from m3rl.errors import M3rlError

logger = logging.getLogger(__name__)


class ClusterError(M3rlError):
    """Ray does not start, or its cluster cannot be joined."""


OBJECT_STORE_BYTES = 256 << 20
"""Shared memory for objects between processes of a local cluster; a step's batch is far below
this."""


@contextmanager
def ray_cluster(num_processes: int) -> Iterator[None]:
    """A Ray cluster for `num_processes` workers, ended on every way out of the block.

    With RAY_ADDRESS set, joins that cluster. Otherwise starts a local one with at least as many
    CPUs as workers: each is limited by its own threads, so two cores hold a rank and a replica.

    Raises:
        ClusterError: Ray does not start, or the cluster cannot be joined.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)  # Ray puts its own, which cleans up nothing
    if ray.is_initialized():
        raise RuntimeError("Ray is already running in this process; close it before starting a run")
    _start(num_processes)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()


def _start(num_processes: int) -> None:
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        options |= {
            "num_cpus": max(num_processes, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        ray.init(**options)
    except Exception as error:  # some of Ray's own are no more than that
        if address:
            cure = "is the cluster up (`ray status`), of the same Ray version? Without RAY_ADDRESS "
            cure += "a local one is started"
            raise ClusterError(f"RAY_ADDRESS={address}: cannot join: {error}; {cure}") from error
        raise ClusterError(
            f"Ray cannot start here: {error}; `m3rl doctor` looks at disk, shared memory and "
            "cores, and /tmp/ray/session_latest/logs says more"
        ) from error


def worker_options(num_threads: int, num_gpus: int = 0, **extra: Any) -> dict[str, Any]:
    """Actor options of one worker process: `num_threads` for OpenMP and torch, no restart behind
    our back."""
    threads = str(num_threads)
    env = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {
        "num_cpus": 1,
        "num_gpus": num_gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": env},
        **extra,
    }


def node_address() -> str:
    """Address of this machine that all workers of the cluster can reach."""
    return str(ray.util.get_node_ip_address())


class Place(NamedTuple):
    """Where Ray has put a worker."""

    node: str
    gpus: tuple[str, ...]
    """Its own, as CUDA_VISIBLE_DEVICES names them on that node."""

    @staticmethod
    def here() -> Place:
        """That of this worker."""
        return Place(
            ray.get_runtime_context().get_node_id(), tuple(str(gpu) for gpu in ray.get_gpu_ids())
        )


def gpus_to_see(places: Sequence[Place]) -> list[list[str]]:
    """Of each rank of a group: its own GPUs, and then those of the others on its node.

    Its own come first, so that device 0, which every thread begins with, is the rank's.
    """
    return [
        [
            *own.gpus,
            *(
                gpu
                for rank, other in enumerate(places)
                if rank != own_rank and other.node == own.node
                for gpu in other.gpus
            ),
        ]
        for own_rank, own in enumerate(places)
    ]


def see_gpus(gpus: Sequence[str]) -> None:
    """Have this worker see `gpus` in their order, not only those that Ray has shown it; before
    anything asks CUDA what there is."""
    if not gpus:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # torch takes ranks whose device has the same number for ranks on one GPU, and maps no common
    # memory for them; here all have number 0. `inference.parallel.peers` goes by the GPUs' UUIDs.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def side_by_side(count: int, num_gpus: int) -> tuple[Any, list[dict[str, Any]]]:
    """Room for `count` workers, on one node if there is one with that much; and the actor options
    of each. The room is to be given back with `remove_placement_group`."""
    bundle = {"CPU": 1} | ({"GPU": num_gpus} if num_gpus else {})
    room = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
    return room, [
        {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                room, placement_group_bundle_index=i
            )
        }
        for i in range(count)
    ]


def run_on_node(node: str, function: Callable[[], None], *, timeout_s: float) -> None:
    """Call `function` on a node of the cluster; in this process, if it is this one's.

    Raises:
        RayError: the node is gone, did not answer in time, or `function` raised there.
    """
    if node == ray.get_runtime_context().get_node_id():
        function()
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(_call)
    task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    ray.get(task.remote(function), timeout=timeout_s)


def _call(function: Callable[[], None]) -> None:
    function()


def put(value: Any) -> Any:
    """Place a value once in the object store, for several workers to read."""
    return ray.put(value)


class WorkerDied(M3rlError):
    """The process of a worker ended while it was asked something."""


def future_of(ref: Any) -> Future[Any]:
    """The future of a Ray call; the death of the worker comes as WorkerDied, in one line."""
    told: Future[Any] = Future()

    def tell(asked: Future[Any]) -> None:
        error = asked.exception()
        if isinstance(error, RayActorError):
            error = WorkerDied(cause_of(error))
        if error is None:
            told.set_result(asked.result())
        else:
            told.set_exception(error)

    ref.future().add_done_callback(tell)
    return told


def cause_of(error: BaseException) -> str:
    """A Ray error in one line, without its remote traceback and Ray's advice."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if isinstance(error, RayActorError):
        pid = next((line for line in lines if line.startswith("pid:")), None)
        if pid is not None:
            return f"its process died ({pid})"
    return f"{type(cause).__name__}: {lines[-1]}" if lines else repr(cause)
