"""What each of several trainer ranks does in a process of a pool, and what it tells."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from m3rl.checkpoint import CheckpointError
from m3rl.rendezvous import Rendezvous
from m3rl.train_rank import TrainRank
from tests.forked import PROCESSES
from tests.m3rl.rank_cases import gradients, random_batch

BATCH, NEXT_BATCH = 20, 21


def batch_of(seed):
    """Rows of 6 to 24 tokens: micro-batches of several samples, split within them by sharers."""
    return random_batch(seed, num_rows=6)


def on_ranks(play, num_ranks, *args):
    """What `play(rank, num_ranks, meet_at, *args)` returns on so many processes at the same time.

    New ones each time: torch keeps meshes of process groups that are gone.
    """
    meeting = Rendezvous("127.0.0.1", 60.0)
    meet_at = f"tcp://{meeting.host}:{meeting.port}"
    ranks = [(rank, num_ranks, meet_at, *args) for rank in range(num_ranks)]
    with PROCESSES.Pool(num_ranks) as pool:
        return pool.starmap(play, ranks, chunksize=1)


def learn(rank_id, num_ranks, meet_at, model, settings):
    """The gradient of a batch, its parts put together, and the step; the rank's own memory."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        told = {"logprobs": rank.logprobs(batch_of(BATCH)), "gradients": {}}
        for name, grad in gradients(rank, batch_of(BATCH)).items():
            told["gradients"][name] = whole_on_host(grad)
        told["metrics"] = rank.update(batch_of(BATCH))
        told["weights"] = {n: t.cpu().numpy().copy() for n, t in rank.policy.export("float64")}
        told["layout"] = rank.policy.layout()
        if settings.dtype != "float64":
            told["hash"] = rank.master_hash()
            told["views"] = {
                slot.name: rank.policy.wire_view(slot.name, slot.bounds)
                .float()
                .cpu()
                .numpy()
                .copy()
                for slot in told["layout"]
            }
        return told
    finally:
        rank.close()


def run(rank_id, num_ranks, meet_at, model, settings, batches):
    """Updates on batches, one after the other: their metrics, and the weights after them."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        metrics = [rank.update(batch) for batch in batches]
        weights = {n: t.numpy().copy() for n, t in rank.policy.export("float64")}
        return {"metrics": metrics, "weights": weights}
    finally:
        rank.close()


def timeouts(rank_id, num_ranks, meet_at, settings):
    """How long each group of the rank waits for the others."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        mesh = rank._group.mesh
        groups = {
            "ranks": mesh.ranks.get_group(),
            "expert_ranks": mesh.expert_ranks.get_group(),
            "expert_groups": mesh.expert_groups,
            "sharers": mesh.sharers,
        }
        cpu = torch.device("cpu")
        return {n: g._get_backend(cpu).options._timeout.total_seconds() for n, g in groups.items()}
    finally:
        rank.close()


def resume(rank_id, num_ranks, meet_at, model, settings, folder, other_settings):
    """A save between two steps, and the second step again after a load in a fresh rank."""
    told = {}
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        rank.update(batch_of(BATCH))
        rank.save(folder)
        told["saved"] = rank.master_hash()
        told["second"] = rank.update(batch_of(NEXT_BATCH))
        told["straight"] = rank.master_hash()
        rank.load_initial(model)
        told["version"] = rank.load(folder)
        assert rank.master_hash() == told["saved"]
        rank.update(batch_of(NEXT_BATCH))
        told["resumed"] = rank.master_hash()
        rank.settings = other_settings
        try:
            rank.load(folder)
        except CheckpointError as error:
            told["refusal"] = str(error)
        rows = batch_of(BATCH)
        told["accuracy"] = rank.greedy_accuracy(rows.ids_BS, rows.length_B, rows.loss_mask_BS)
        return told
    finally:
        rank.close()


def whole_on_host(grad):
    """A gradient, its parts on all ranks put together where it has parts."""
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole.cpu().numpy()


def joined(told, ep):
    """The gradient that ranks told: experts of each group one after the other."""
    result = {}
    for name in told[0]["gradients"]:
        groups = told[:ep] if ".mlp.experts." in name else told[:1]
        result[name] = torch.from_numpy(np.concatenate([t["gradients"][name] for t in groups]))
    return result
