"""What each of several trainer ranks does that save together, and what it tells."""

import os
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter

import m3rl.parallel.save as parallel_save
from inference.models.weights import CheckpointError as RuntimeCheckpointError
from m3rl import policy_weights, rank_state
from m3rl.checkpoint import CheckpointError
from m3rl.train_rank import TrainRank
from tests.m3rl.parallel_process import BATCH, batch_of

MAX_SHARD_BYTES = 20_000
NO_SPACE = "No space left on device"


def save(rank_id, num_ranks, meet_at, model, settings, folder):
    """One checkpoint and one BF16 model after a step; the files that this rank wrote."""
    policy_weights.MAX_SHARD_BYTES = MAX_SHARD_BYTES
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    written = []
    real = parallel_save.write_shard
    parallel_save.write_shard = lambda file, shard: (written.append(file.name), real(file, shard))
    try:
        rank.load_initial(model)
        rank.update(batch_of(BATCH))
        rank.save(folder / "saved")
        told = {"written": written.copy(), "hash": rank.master_hash()}
        rank.save_model(folder / "model", "bfloat16")
        told["weights"] = {n: t.clone().numpy() for n, t in rank.policy.export("float32")}
        return told
    finally:
        parallel_save.write_shard = real
        rank.close()


def fail(rank_id, num_ranks, meet_at, model, settings, folder):
    """What each way to fail on rank 1 raises here."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        own = folder if rank_id == 0 else folder / "other_host"
        (own / "scattered").mkdir(parents=True)
        told = {
            "absent": _error(rank.save, own / "absent" if rank_id else folder / "present"),
            "scattered": _error(rank.save, own / "scattered"),
            "again": _error(rank.save, folder / "present"),
        }
        real, real_write_data = parallel_save.write_shard, FileSystemWriter.write_data
        real_torch_save = torch.save
        if rank_id == 1:
            parallel_save.write_shard = _full_disk
        told["full"] = _error(rank.save_model, folder / "model")
        parallel_save.write_shard = real
        if rank_id == 1:
            rank_state.torch.save = _full_disk_of_torch
        told["state"] = _error(rank.save, folder / "state")
        rank_state.torch.save = real_torch_save
        rank.update(batch_of(BATCH))
        if rank_id == 1:
            FileSystemWriter.write_data = _no_room
        told["optimizer"] = _error(rank.save, folder / "optimizer")
        FileSystemWriter.write_data = real_write_data
        told["after_state"] = _error(rank.save, folder / "after_state")
        told["foreign"] = _error(rank.save_model, folder / "thesis")
        told["after"] = _error(rank.save_model, folder / "other_model")
        return told
    finally:
        rank.close()


def die(rank_id, num_ranks, meet_at, model, settings, folder):
    """Rank 1 is gone in its first file; the others note how long they were kept."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    rank.load_initial(model)
    if rank_id == 1:
        parallel_save.write_shard = lambda file, shard: os._exit(9)
    began = time.monotonic()
    try:
        rank.save(folder)
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        (folder / f"error{rank_id}").write_text(f"{waited_s} {type(error).__name__}")
    os._exit(0)  # a group with a dead rank cannot be left


def _full_disk(file: Path, shard):
    raise RuntimeCheckpointError(f"cannot write {file}: {NO_SPACE}")


def _full_disk_of_torch(state, file):
    raise RuntimeError(f"PytorchStreamWriter failed: {NO_SPACE}")


def _no_room(self, plan, planner):
    raise OSError(28, NO_SPACE)


def _error(call, *args):
    try:
        call(*args)
    except CheckpointError as error:
        return str(error)
    return None
