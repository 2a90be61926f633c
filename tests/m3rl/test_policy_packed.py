"""The packed policy in FP64 against transformers, and what must not change its gradient."""

import numpy as np
import pytest
import torch
from transformers import MiniMaxM3VLForCausalLM
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

import m3rl.policy_layers
from inference.kernels.packing import Packing
from m3rl.grpo.replay import ChoiceStats, Record, recorded_blocks
from m3rl.policy import Policy
from m3rl.policy_layers import ATTENTION, varlen_attention
from tests.m3rl.rank_cases import distance
from tests.m3rl.test_policy import CONFIG, make, packed
from tests.tiny_models import random_checkpoint, transformers_model

LENGTHS = [21, 1, 13, 8, 30, 5]
NUM_SPARSE, NUM_KV_HEADS, TOPK_BLOCKS, BLOCK = 3, 2, 2, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    return path, random_checkpoint(path, CONFIG, seed=0)


@pytest.fixture
def wide_transformers(checkpoint, monkeypatch):
    """transformers' model in FP64, its norms, router and indexer too."""
    model = transformers_model(CONFIG, checkpoint[1]).double()
    narrow = torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)
    )
    return model


def gradients(policy, ids_T, packing, **options):
    """Gradients of a fixed weighing of the log-probabilities of all tokens that have one."""
    targets = torch.arange(packing.num_tokens)[packing.positions_T > 0]
    weights = torch.sin(torch.arange(len(targets), dtype=policy.dtype))
    policy.zero_grad()
    logprobs, _ = policy(ids_T, packing, targets, temperature=0.8, **options)
    (logprobs * weights).sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def test_logits_and_gradients_are_those_of_transformers_sample_by_sample(
    checkpoint, wide_transformers
):
    policy, oracle = make(checkpoint, "float64"), wide_transformers
    ids_T, packing = packed(LENGTHS)
    actual = gradients(policy, ids_T, packing)
    logits = torch.cat([oracle(ids[None]).logits[0] for ids in ids_T.split(LENGTHS)])
    hidden = policy.hidden_states(ids_T, packing)
    torch.testing.assert_close(hidden @ policy.model.lm_head.weight.T, logits, atol=1e-10, rtol=0)
    is_target = packing.positions_T > 0
    log_p = (logits / 0.8).log_softmax(-1)[:-1][is_target[1:]]
    chosen = log_p.gather(-1, ids_T[is_target][:, None])[:, 0]
    (chosen * torch.sin(torch.arange(len(chosen), dtype=torch.float64))).sum().backward()
    expected = {n: p.grad for n, p in oracle.named_parameters() if p.grad is not None}
    assert distance(actual, expected) < 1e-10


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
def test_the_gradient_does_not_depend_on_how_samples_are_packed(checkpoint, dtype, bound):
    policy = make(checkpoint, dtype)
    ids_T, packing = packed(LENGTHS)
    samples = ids_T.split(LENGTHS)
    weights = torch.sin(torch.arange(packing.num_tokens, dtype=policy.dtype)).split(LENGTHS)

    def summed(groups):
        policy.zero_grad()
        for group in groups:
            part = Packing.of([LENGTHS[b] for b in group], "cpu")
            targets = torch.arange(part.num_tokens)[part.positions_T > 0]
            logprobs, _ = policy(
                torch.cat([samples[b] for b in group]), part, targets, temperature=1.0
            )
            loss = logprobs * torch.cat([weights[b] for b in group])[targets]
            loss.sum().backward()
        return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}

    whole = summed([range(len(LENGTHS))])
    for groups in ([[5, 0, 3, 1, 4, 2]], [[0, 1], [2, 3, 4, 5]], [[b] for b in (3, 0, 5, 4, 2, 1)]):
        assert distance(summed(groups), whole) <= bound


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_layers_computed_again_give_the_bits_of_layers_that_were_kept(checkpoint, dtype):
    sample = packed(LENGTHS)
    kept = gradients(make(checkpoint, dtype), *sample)
    again = gradients(make(checkpoint, dtype, activation_checkpointing=True), *sample)
    assert kept.keys() == again.keys()
    for name, grad in kept.items():
        assert torch.equal(again[name], grad), name


def test_layers_computed_again_keep_less_for_the_backward_pass(checkpoint):
    def saved_bytes(policy):
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        memory = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                memory[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = policy.hidden_states(*packed(LENGTHS))
        assert hidden.requires_grad
        return sum(memory.values())

    whole, again = (
        saved_bytes(make(checkpoint, activation_checkpointing=flag)) for flag in (False, True)
    )
    assert again < whole / 3  # what the last of four layers keeps, and inputs


def test_layers_computed_again_neither_choose_nor_count_again(checkpoint, monkeypatch):
    calls = []
    for name in ("keep_experts", "keep_blocks"):
        real = getattr(m3rl.policy_layers.ForwardPass, name)

        def spy(run, layer, own, real=real, name=name):
            calls.append((name, layer))
            real(run, layer, own)

        monkeypatch.setattr(m3rl.policy_layers.ForwardPass, name, spy)
    policy = make(checkpoint, activation_checkpointing=True)
    stats = ChoiceStats.zeros(3, 8, torch.device("cpu"))
    gradients(policy, *packed(LENGTHS), stats=stats)
    assert sorted(calls) == sorted(
        (name, layer) for layer in (1, 2, 3) for name in ("keep_experts", "keep_blocks")
    )
    assert stats.load_LE.sum(-1).tolist() == [sum(LENGTHS) * 2] * 3


def own_blocks(policy, ids_T, packing):
    """Records [length - 1, layers, K, B] of what the policy chooses itself."""
    seen = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            m3rl.policy_layers.ForwardPass,
            "keep_blocks",
            lambda run, layer, own: run.blocks.update({layer: seen.setdefault(layer, own)}),
        )
        policy.hidden_states(ids_T, packing)
    blocks_TLKB = torch.stack([seen[layer] for layer in sorted(seen)], 1).numpy()
    return [blocks[:-1] for blocks in np.split(blocks_TLKB, np.cumsum(packing.lengths)[:-1])]


def lay_out(records, packing):
    return Record(
        blocks=recorded_blocks(
            records,
            packing.lengths,
            num_layers=NUM_SPARSE,
            num_heads=NUM_KV_HEADS,
            topk_blocks=TOPK_BLOCKS,
            block_size=BLOCK,
            device=torch.device("cpu"),
        )
    )


def test_replaying_its_own_blocks_changes_no_bit_and_agrees_fully(checkpoint):
    policy = make(checkpoint, replay_blocks=True)
    sample = packed(LENGTHS)
    stats = ChoiceStats.zeros(3, 8, torch.device("cpu"))
    record = lay_out(own_blocks(policy, *sample), sample[1])
    replayed = policy.hidden_states(*sample, record=record, stats=stats)
    assert torch.equal(replayed, policy.hidden_states(*sample))
    metrics = stats.metrics(replays_experts=False, replays_blocks=True)
    assert metrics["m3/block_agreement"] == 1.0
    assert 0.8 < metrics["m3/block_replay_coverage"] < 1.0


def test_recorded_blocks_are_what_attention_reads(checkpoint):
    policy = make(checkpoint, replay_blocks=True)
    ids_T, packing = packed([30])
    (record,) = own_blocks(policy, ids_T, packing)
    first_and_local = record.copy()
    first_and_local[9:, ..., 0] = 0  # every late token reads the first block and its own
    first_and_local[9:, ..., 1] = (np.arange(9, 29) // BLOCK)[:, None, None]
    changed = lay_out([first_and_local], packing)
    stats = ChoiceStats.zeros(3, 8, torch.device("cpu"))
    replayed = policy.hidden_states(ids_T, packing, record=changed, stats=stats)
    own = policy.hidden_states(ids_T, packing)
    torch.testing.assert_close(replayed[:8], own[:8], atol=1e-6, rtol=0)
    assert (replayed[9:-1] - own[9:-1]).abs().max() > 1e-3
    assert 0.4 < stats.metrics(replays_experts=False, replays_blocks=True)["m3/block_agreement"] < 1
    bystander = make(checkpoint)
    compared = bystander.hidden_states(ids_T, packing, record=changed)
    assert torch.equal(compared, bystander.hidden_states(ids_T, packing))


def test_transformers_own_model_runs_on_the_registered_attention(checkpoint):
    oracle = transformers_model(CONFIG, checkpoint[1])
    ids = packed([30])[0][None]
    expected = oracle(ids).logits
    oracle.set_attn_implementation(ATTENTION)
    assert isinstance(oracle, MiniMaxM3VLForCausalLM)
    assert type(oracle.model.layers[1].self_attn.indexer) is MiniMaxM3VLIndexer
    actual = oracle(ids, packing=Packing.of([30], "cpu")).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "mask"), [(2, None), (1, torch.ones(1, 1, 3, 3))])
def test_the_registered_attention_refuses_padded_rows_and_masks(rows, mask):
    q, k = torch.zeros(rows, 4, 3, 8), torch.zeros(rows, 2, 3, 8)
    with pytest.raises(ValueError, match="takes one packed row and no mask"):
        varlen_attention(
            torch.nn.Module(), q, k, k, mask, scaling=1.0, packing=Packing.of([3], "cpu")
        )


def test_a_bf16_policy_rounds_its_masters_in_the_recomputation_too(checkpoint):
    policy = make(checkpoint, "bfloat16", activation_checkpointing=True)
    seen = []
    attention = policy.model.model.layers[2].self_attn
    attention.q_proj.register_forward_pre_hook(
        lambda module, _: seen.append((module.weight.dtype, torch.is_grad_enabled()))
    )
    gradients(policy, *packed([9]))
    assert seen == [(torch.bfloat16, True)] * 2
    assert attention.q_proj.weight.dtype == torch.float32
    assert isinstance(policy, Policy)
