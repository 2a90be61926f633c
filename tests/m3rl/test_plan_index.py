"""What the planner says of the index branch's loss, against what its kernels and autograd keep."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference.config import ModelConfig
from inference.kernels import index_alignment, qk_norm_rope
from inference.kernels.index_alignment import launch
from inference.kernels.packing import Packing
from m3rl import plan_index
from m3rl.index_alignment import IndexLoss, IndexLossSettings
from m3rl.plan_index import IndexLossMemory
from m3rl.plan_lora import plan_rank
from m3rl.plan_trainer import TrainerSetting
from m3rl.policy import Policy
from tests.released_model import FOLDER
from tests.tiny_models import model_config, tiny_config

RELEASED = ModelConfig.from_pretrained(FOLDER)
SIZES = {"sparse_block_size": 16, "sparse_topk_blocks": 4}
MODEL = model_config(tiny_config(num_hidden_layers=2, **SIZES))
"""One of its layers is sparse."""
NUM_TOKENS = 90


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels keep less than references."""
    for module in (index_alignment, qk_norm_rope):
        monkeypatch.setattr(module, "use_kernel", lambda *_: True)


def kept_bytes(policy, num_tokens, index_loss):
    """Distinct memory that autograd keeps of a forward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    ids_T = torch.arange(num_tokens) % MODEL.vocab_size
    packing = Packing.of([num_tokens], "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.hidden_states(ids_T, packing, index_loss=index_loss)
    del hidden
    return sum(storage.nbytes() for storage in storages.values())


def test_tiles_and_units_are_those_of_the_kernels():
    assert (plan_index.TILE, plan_index.UNIT) == (launch.TILE, launch.UNIT)


def test_a_layer_keeps_what_is_planned():
    policy = Policy(MODEL, dtype="float32", trains_index=True)
    policy.init_random(0, std=0.1, embedding_std=1.0, bias_std=0.01)
    loss = IndexLoss(IndexLossSettings(coef=0.5), float(NUM_TOKENS), NUM_TOKENS)
    more = kept_bytes(policy, NUM_TOKENS, loss) - kept_bytes(policy, NUM_TOKENS, None)
    planned = IndexLossMemory(MODEL, 4, NUM_TOKENS, NUM_TOKENS).kept
    assert planned == pytest.approx(more, rel=0.05)


class Allocated(TorchDispatchMode):
    """Adds up the memory that operations make."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.storages[id(out.untyped_storage())] = out.untyped_storage()  # and keeps it
        return out

    @property
    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def test_the_backward_pass_adds_what_is_planned():
    K, D, size = MODEL.num_key_value_heads, MODEL.index_head_dim, MODEL.index_block_size
    index_q = torch.randn(NUM_TOKENS, K, D, requires_grad=True)
    index_k = torch.randn(NUM_TOKENS, D, requires_grad=True)
    q, k = torch.randn(NUM_TOKENS, 2 * K, 16), torch.randn(NUM_TOKENS, K, 16)
    own = torch.arange(NUM_TOKENS)[:, None, None] // size
    blocks = (own - torch.arange(MODEL.index_topk_blocks)).clamp(min=-1).expand(-1, K, -1).int()
    rule = {"scale": 0.3, "index_scale": 0.2, "block_size": size, "level": "token"}
    packing = Packing.of([NUM_TOKENS], "cpu")
    kl = index_alignment.index_alignment(index_q, index_k, q, k, blocks, packing, **rule)
    grad = torch.ones_like(kl)
    with Allocated() as allocated:
        torch.autograd.grad(kl, (index_q, index_k), grad)
    planned = IndexLossMemory(MODEL, 4, NUM_TOKENS, NUM_TOKENS).added
    assert planned == pytest.approx(allocated.num_bytes, rel=0.05)


def test_the_loss_counts_in_the_moment_that_is_fullest():
    setting = TrainerSetting(
        RELEASED, "bfloat16", "cuda", ranks=128, ep=8, micro_batch_tokens=8192, num_micro_batches=4
    )
    trained = dataclasses.replace(setting, trains_index=True)
    before, after = plan_rank(setting), plan_rank(trained)
    # A key's weight in BF16 and a row's token, for 16 blocks of 128 keys on 4 heads of 8192 tokens,
    # lists of 64 blocks padded by 63 rows; queries twice, keys, and slopes of the index branch.
    rows = 8192 * 4 * 16 + 4 * 64 * 63 + 64
    kept = rows * (2 * 128 + 4) + 8192 * 128 * (2 * 2 * 4 + 2 + 4 * 4)
    of_layer = "a layer's stream and attention"
    assert before.peak == after.peak
    assert after.uses[of_layer] - before.uses[of_layer] == pytest.approx(kept, abs=8192)
