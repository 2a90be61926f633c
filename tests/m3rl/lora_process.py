"""What each of several trainer ranks with adapters does in a process of its own."""

from m3rl.train_rank import TrainRank
from tests.m3rl.rank_cases import random_batch

SEEDS = (50, 51, 52)


def batch_of(seed):
    return random_batch(seed, num_rows=6)


def learn(rank_id, num_ranks, meet_at, model, settings, folder):
    """Gradients and steps, a save before the last one, and that step again after a load."""
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        initial = rank.master_hash() if settings.dtype != "float64" else None
        told = {"initial": initial, "base": initial and rank.policy.base_hash()}
        told["gradients"] = summed_gradients(rank)
        told["metrics"] = [rank.update(batch_of(seed)) for seed in SEEDS[:2]]
        if settings.dtype != "float64":
            rank.save(folder)
        told["metrics"].append(rank.update(batch_of(SEEDS[2])))
        told["weights"] = {n: t.double().numpy().copy() for n, t in rank.policy.export("float64")}
        told["layout"] = rank.policy.layout()
        told["logprobs"] = rank.logprobs(batch_of(SEEDS[0]))
        if settings.dtype != "float64":
            told["hash"] = rank.master_hash()
            told["views"] = {
                slot.name: rank.policy.wire_view(slot.name, slot.bounds).double().numpy().copy()
                for slot in told["layout"]
            }
            rank.load_initial(model)
            told["version"] = rank.load(folder)
            rank.update(batch_of(SEEDS[2]))
            told["resumed"] = rank.master_hash()
        return told
    finally:
        rank.close()


def summed_gradients(rank):
    """As an optimizer step sees them."""
    taken = {}

    def keep(loss):
        rank.policy.sum_gradients()
        for name, parameter in rank.policy.adapters.named_parameters():
            taken[name] = parameter.grad.numpy().copy()
            parameter.grad = None
        return {"loss": loss}

    real, rank._optimizer.step = rank._optimizer.step, keep
    try:
        rank.update(batch_of(SEEDS[0]))
    finally:
        rank._optimizer.step = real
    return taken
