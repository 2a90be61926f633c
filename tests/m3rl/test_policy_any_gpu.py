"""Policies of other architectures on a GPU, in BF16, against transformers' model in FP32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.kernels.packing import Packing
from m3rl.policy_any import TransformersPolicy
from tests.m3rl.any_models import QWEN3, QWEN3_MOE, write_any
from tests.m3rl.rank_cases import SETTINGS, on_policy, random_batch, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = {"hidden_size": 256, "head_dim": 128, "max_position_embeddings": 2048}
KINDS = {
    "qwen3": QWEN3 | WIDE | {"intermediate_size": 512},
    "qwen3_moe": QWEN3_MOE | WIDE | {"moe_intermediate_size": 128, "intermediate_size": 512},
}
LENGTHS = (300, 1, 700, 129)


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(folder, transformers' model)"""
    path = tmp_path_factory.mktemp(request.param)
    return path, write_any(path, KINDS[request.param])


@pytest.mark.parametrize("recomputes", [False, True])
def test_packed_logprobs_and_gradients_are_those_of_each_sample_alone(model, recomputes):
    path, oracle = model
    ids_T = torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    policy = TransformersPolicy(path, dtype="bfloat16", activation_checkpointing=recomputes)
    policy.load(path)
    policy.cuda()
    is_first_T = torch.zeros(len(ids_T), dtype=torch.bool)
    is_first_T[np.cumsum((0, *LENGTHS[:-1]))] = True
    targets_M = (~is_first_T).nonzero()[:, 0]
    packing = Packing.of(LENGTHS, "cuda")
    logprobs_M, _ = policy(ids_T.cuda(), packing, targets_M.cuda(), temperature=1.0)
    logprobs_M.sum().backward()
    oracle.zero_grad()
    wanted = []
    for ids in ids_T.split(LENGTHS):
        log_p = oracle(ids[None]).logits[0].log_softmax(-1)
        wanted.append(log_p[:-1].gather(1, ids[1:, None])[:, 0])
    torch.cat(wanted).sum().backward()
    off = (logprobs_M.detach().cpu() - torch.cat(wanted).detach()).abs()
    assert off.mean() < 0.03  # logits of up to 10, in BF16
    embedding = oracle.get_input_embeddings().weight.grad
    mine = next(p.grad for name, p in policy.named_parameters() if "embed_tokens" in name).cpu()
    assert (mine - embedding).norm() < 0.1 * embedding.norm()


def test_a_rank_on_the_gpu_learns_and_resumes_bit_for_bit(model, tmp_path):
    path, _ = model
    settings = replace(SETTINGS, dtype="bfloat16", device="cuda", activation_checkpointing=True)
    rank = start(path, settings)
    batch = on_policy(rank, random_batch(3))
    metrics = [rank.update(batch) for _ in range(5)]
    assert metrics[0]["mismatch/logprob_abs_diff_mean"] < 1e-6
    moved = ((rank.logprobs(batch) - batch.behaviour_logprobs_BS) * batch.loss_mask_BS).sum(-1)
    assert (np.sign(moved) == np.sign(batch.advantages_B)).mean() > 0.8
    rank.save(tmp_path)
    resumed = start(path, settings)
    assert resumed.load(tmp_path) == 5
    for each in (rank, resumed):
        each.update(random_batch(4))
    assert resumed.master_hash() == rank.master_hash()
