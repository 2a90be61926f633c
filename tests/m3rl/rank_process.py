"""What each of two trainer ranks does in a process of its own."""

import json
import sys

import numpy as np
import torch

from m3rl.train_rank import TrainRank
from tests.m3rl.rank_cases import gradients, random_batch, with_optimizer

# With one row the second rank has none. Adam's first step is lr * g / (|g| + eps): the
# eps keeps it from giving gradients that are rounding noise a step of full size.
TWO_RANKS = with_optimizer(eps=1e-4)
ROWS = {0: 7, 1: 3, 2: 1, 3: 7}


def two_rank_batches():
    return [random_batch(20 + step, num_rows=rows) for step, rows in ROWS.items()]


def play_rank(rank_id, world_size, model, out, meet_at):
    """A rank's whole life, run as a process: a straight run, or its second half after a resume."""
    rank = TrainRank(TWO_RANKS, rank_id, world_size, meet_at)
    rank.load_initial(model)
    batches = two_rank_batches()
    if (out / "saved").exists():
        rank.load(out / "saved")
        for batch in batches[2:]:
            rank.update(batch)
        record = {"resumed_hash": rank.master_hash(), "version": rank.policy_version}
    else:
        grads = {name: grad.full_tensor() for name, grad in gradients(rank, batches[0]).items()}
        torch.save(grads, out / f"grad{rank_id}")
        logprobs = rank.logprobs(batches[0])
        metrics = []
        for step, batch in enumerate(batches):
            metrics.append(rank.update(batch))
            if step == 0:
                weights = dict(rank.policy.export("float32"))
                if rank_id == 0:
                    torch.save(weights, out / "weights")
            if step == 1:
                (out / "saving").mkdir(exist_ok=True)
                rank.save(out / "saving")
        broken = random_batch(40)
        broken.advantages_B[0] = np.nan
        skipped = rank.update(broken)["optim/update_skipped"]
        record = {
            "hash": rank.master_hash(),
            "metrics": metrics,
            "logprobs": logprobs.tolist(),
            "skipped": skipped,
            "neighbours": sorted({"ray", "wandb", "vllm"} & set(sys.modules)),
        }
    (out / f"record{rank_id}.json").write_text(json.dumps(record))
    rank.close()
