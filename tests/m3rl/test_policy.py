import numpy as np
import pytest
import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTopKRouter

import m3rl.policy_layers
from inference.kernels.packing import Packing
from inference.models.weights import write_checkpoint
from m3rl.checkpoint import CheckpointError
from m3rl.grpo.replay import ChoiceStats, Record, recorded_experts
from m3rl.policy import Policy
from tests.tiny_models import model_config, random_checkpoint, tiny_config, transformers_model

CONFIG = tiny_config(eos_token_id=2, pad_token_id=2)
NUM_MOE, NUM_EXPERTS, TOPK = 3, 8, 2
ROUTER_CLASS_FORWARD = MiniMaxM3VLTopKRouter.forward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tensors = random_checkpoint(path, CONFIG, seed=0)
    return path, tensors


def make(checkpoint, dtype="float32", **options):
    policy = Policy(model_config(CONFIG), dtype=dtype, **options)
    policy.load(checkpoint[0])
    return policy


@pytest.fixture(scope="module")
def policy(checkpoint):
    return make(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return transformers_model(CONFIG, checkpoint[1])


def packed(lengths, seed=0):
    """(ids, packing) of random samples."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(1, 97, (sum(lengths),), generator=generator)
    return ids_T, Packing.of(lengths, "cpu")


def logits(policy, ids_T, packing):
    return policy.hidden_states(ids_T, packing).float() @ policy.model.lm_head.weight.T


def new_stats():
    return ChoiceStats.zeros(NUM_MOE, NUM_EXPERTS, torch.device("cpu"))


def router_metrics(stats, **changes):
    return stats.metrics(**({"replays_experts": True, "replays_blocks": False} | changes))


@pytest.mark.parametrize("lengths", [[n] for n in (1, 3, 4, 5, 7, 8, 9, 24)] + [[21, 1, 13, 4]])
def test_logits_equal_transformers_sample_by_sample(policy, oracle, lengths):
    # Block 4 and top-k 2: from length 9 on the sparse layers drop blocks.
    ids_T, packing = packed(lengths)
    actual = logits(policy, ids_T, packing)
    expected = torch.cat([oracle(ids[None]).logits[0] for ids in ids_T.split(lengths)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


# BR-029
def test_a_packed_sample_computes_as_if_it_stood_alone(policy):
    ids_T, packing = packed([21, 13, 8, 1])
    together = policy.hidden_states(ids_T, packing)
    for ids, hidden in zip(
        ids_T.split(packing.lengths), together.split(packing.lengths), strict=True
    ):
        alone = policy.hidden_states(ids, Packing.of([len(ids)], "cpu"))
        torch.testing.assert_close(hidden, alone, atol=1e-5, rtol=0)


def test_ids_and_packing_that_disagree_are_refused(policy):
    ids_T, packing = packed([5, 5])
    with pytest.raises(ValueError, match=r"shape \(9,\) for 10 tokens"):
        policy.hidden_states(ids_T[:-1], packing)


def test_samples_beyond_the_models_context_are_refused(policy):
    with pytest.raises(ValueError, match="513 tokens exceeds max_position_embeddings=512"):
        policy.hidden_states(*packed([3, 513]))


# BR-027
def test_logprobs_stand_at_their_token_and_do_not_cross_samples(policy, oracle):
    # A = [5, 6, 7] and B = [8, 9]: targets are 6, 7 | 9, never 8 from A or 5 from B.
    ids_T, packing = torch.tensor([5, 6, 7, 8, 9]), Packing.of([3, 2], "cpu")
    together, _ = policy(ids_T, packing, torch.tensor([1, 2, 4]), temperature=1.0)
    log_p_a = oracle(torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)[0]
    log_p_b = oracle(torch.tensor([[8, 9]])).logits.log_softmax(-1)[0]
    expected = torch.stack([log_p_a[0, 6], log_p_a[1, 7], log_p_b[0, 9]])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)
    shifted = torch.stack([log_p_a[1, 6], log_p_a[2, 7], log_p_b[1, 9]])
    assert (together - shifted).abs().mean() > 0.1


# BR-020
def test_temperature_divides_the_logits(policy, oracle):
    ids_T, packing = packed([12])
    actual, entropy = policy(ids_T, packing, torch.arange(5, 12), temperature=0.7)
    log_p = (oracle(ids_T[None]).logits / 0.7).log_softmax(-1)[0, 4:11]
    torch.testing.assert_close(actual, log_p.gather(-1, ids_T[5:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)


def test_a_bf16_policy_computes_with_the_values_that_go_over_the_wire(checkpoint):
    sample = packed([17, 9])
    policy, rounded = make(checkpoint, "bfloat16"), make(checkpoint, "bfloat16")
    masters = rounded.model.state_dict()
    for name, tensor in rounded.wire_state().items():
        masters[name].copy_(tensor)
    hidden = policy.hidden_states(*sample)
    assert torch.equal(hidden, rounded.hidden_states(*sample))
    assert not torch.equal(hidden.float(), make(checkpoint).hidden_states(*sample))


# BR-006, BR-068
def test_router_weight_and_bias_stay_fp32_in_a_bf16_policy(checkpoint, monkeypatch):
    policy = make(checkpoint, "bfloat16")
    gate = policy.model.model.layers[1].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias.fill_(0.1234567)  # 0.12354 in bf16
    wire = policy.wire_view("model.layers.1.block_sparse_moe.e_score_correction_bias")
    assert wire.dtype == torch.float32
    assert wire.tolist() == pytest.approx([0.1234567] * NUM_EXPERTS, abs=1e-8)
    seen = []

    def spy(x, weight, bias, **options):
        seen.append((weight.dtype, bias.dtype, torch.equal(weight, gate.weight)))
        return real(x, weight, bias, **options)

    real = m3rl.policy_layers.router
    monkeypatch.setattr(m3rl.policy_layers, "router", spy)
    policy.hidden_states(*packed([6]))
    assert seen[0] == (torch.float32, torch.float32, True)


def test_gradients_reach_fp32_masters_through_the_rounding(checkpoint):
    policy = make(checkpoint, "bfloat16")
    policy(*packed([17]), torch.arange(4, 17), temperature=1.0)[0].sum().backward()
    without = [name for name, p in policy.named_parameters() if p.grad is None]
    assert without
    assert all(".indexer." in name for name in without)
    assert all(p.grad.dtype == torch.float32 for p in policy.parameters() if p.grad is not None)


# BR-006
def test_the_correction_bias_decides_who_is_chosen(checkpoint):
    policy = make(checkpoint)
    bias = policy.model.model.layers[1].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(torch.tensor([0, 0, 0, 10, 0, 0, 0, 0.0]))
    stats = new_stats()
    policy.hidden_states(*packed([11, 6]), stats=stats)
    assert stats.load_LE[0, 3] == 17
    assert stats.load_LE.sum(-1).tolist() == [17 * TOPK] * NUM_MOE


def own_experts(policy, ids_T, packing):
    """Records [length - 1, layers, A] of what the policy chooses itself."""
    seen = {}
    real = m3rl.policy_layers.ForwardPass.keep_experts

    def spy(run, layer, own_TA):
        seen[layer] = own_TA
        real(run, layer, own_TA)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(m3rl.policy_layers.ForwardPass, "keep_experts", spy)
        policy.hidden_states(ids_T, packing)
    ids_TLA = torch.stack([seen[layer] for layer in sorted(seen)], 1).numpy().astype(np.uint8)
    return [ids[:-1] for ids in np.split(ids_TLA, np.cumsum(packing.lengths)[:-1])]


def lay_out(records, packing):
    model = {"num_layers": NUM_MOE, "topk": TOPK, "num_experts": NUM_EXPERTS}
    device = torch.device("cpu")
    return Record(experts=recorded_experts(records, packing.lengths, **model, device=device))


def test_replaying_its_own_experts_changes_no_bit(checkpoint):
    policy = make(checkpoint, replay_routing=True)
    sample = packed([14, 9])
    record, stats = lay_out(own_experts(policy, *sample), sample[1]), new_stats()
    replayed = policy.hidden_states(*sample, record=record, stats=stats)
    assert torch.equal(replayed, policy.hidden_states(*sample))
    metrics = router_metrics(stats)
    assert metrics["m3/router_agreement"] == 1.0
    assert metrics["m3/router_replay_coverage"] == pytest.approx((13 + 8) / (14 + 9))


def test_replayed_experts_are_used_and_the_router_still_learns(checkpoint):
    policy = make(checkpoint, replay_routing=True)
    sample = packed([14])
    (own,) = own_experts(policy, *sample)
    other = (own + 1) % NUM_EXPERTS
    record, stats = lay_out([other], sample[1]), new_stats()
    replayed = policy.hidden_states(*sample, record=record, stats=stats)
    assert not torch.allclose(replayed, policy.hidden_states(*sample), atol=1e-3)
    expected = np.bincount(other[:, 0].ravel(), minlength=NUM_EXPERTS)
    assert (stats.load_LE[0].numpy() - expected).sum() == TOPK  # the last token chose for itself
    replayed.sum().backward()
    assert policy.model.model.layers[1].mlp.gate.weight.grad.abs().max() > 0
    # Without the switch the record is only compared with.
    bystander = make(checkpoint)
    plain = bystander.hidden_states(*sample, record=record)
    assert torch.equal(plain, bystander.hidden_states(*sample))


def test_forwards_are_replaced_in_this_policy_only(checkpoint, oracle, policy):
    sample = packed([6])
    oracle(sample[0][None])
    assert MiniMaxM3VLTopKRouter.forward is ROUTER_CLASS_FORWARD
    other = make(checkpoint)
    with torch.no_grad():
        other.model.model.layers[1].mlp.gate.weight.neg_()
    before = policy.hidden_states(*sample)
    assert not torch.equal(other.hidden_states(*sample), before)
    assert torch.equal(policy.hidden_states(*sample), before)


def test_a_frozen_copy_has_weights_and_routers_of_its_own(checkpoint):
    policy = make(checkpoint)
    copy = policy.frozen_copy()
    sample = packed([9])
    before = copy.hidden_states(*sample)
    with torch.no_grad():
        for tensor in policy.model.state_dict().values():
            tensor.mul_(-1.5)
    assert torch.equal(copy.hidden_states(*sample), before)
    assert not any(p.requires_grad for p in copy.parameters())


# BR-065
@pytest.mark.parametrize(
    ("gate", "up", "expected"), [(1, 0.5, 1.26869), (10, -10, -41.99972), (-3, 2, -0.05421)]
)
@pytest.mark.parametrize("kind", ["experts", "shared", "dense"])
def test_every_mlp_clamps_and_gates_as_m3_does(checkpoint, kind, gate, up, expected):
    # alpha 1.702, limit 7: plain SiLU would give 0.36553, -99.99546, -0.28456.
    layers = make(checkpoint).model.model.layers
    moe = layers[1].mlp
    mlp = {"experts": moe.experts, "shared": moe.shared_experts, "dense": layers[0].mlp}[kind]
    hidden = torch.zeros(1, CONFIG["hidden_size"])
    hidden[0, :2] = torch.tensor([gate, up])
    with torch.no_grad():
        first, second = (p for _, p in sorted(mlp.named_parameters(), reverse=True))
        first.zero_()
        second.zero_()
        first[..., 0, 0] = 1  # the first gate row reads the first value, the first up row the next
        first[..., first.shape[-2] // 2, 1] = 1
        second[..., 0, 0] = 1
        routed = (torch.tensor([[3, 5]]), torch.tensor([[1.0, 0.0]])) if kind == "experts" else ()
        assert mlp(hidden, *routed)[0, 0].item() == pytest.approx(expected, abs=2e-5)


def test_the_index_branch_is_frozen_and_everything_else_is_trained(policy):
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert len(frozen) == 4 * 3
    assert all(".indexer." in name for name in frozen)


# BR-039
def test_the_embedding_of_the_pad_token_is_trained_when_it_is_the_end_token(checkpoint):
    policy = make(checkpoint)
    ids_T, packing = torch.tensor([5, 2, 7, 9]), Packing.of([4], "cpu")
    policy(ids_T, packing, torch.tensor([2, 3]), temperature=1.0)[0].sum().backward()
    grad = policy.model.model.embed_tokens.weight.grad
    assert grad[2].abs().max() > 0
    assert grad[50].abs().max() == 0


# BR-006
def test_a_checkpoint_with_values_that_are_not_finite_is_refused(tmp_path):
    tensors = random_checkpoint(tmp_path / "good", CONFIG, seed=0)
    tensors["lm_head.weight"][3, 3] = torch.inf
    write_checkpoint(tmp_path / "bad", tensors.items(), max_shard_bytes=1 << 30)
    policy = Policy(model_config(CONFIG), dtype="float32")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds values that are not finite"):
        policy.load(tmp_path / "bad")


def test_the_runtimes_refusals_of_a_checkpoint_are_m3rls(checkpoint, tmp_path):
    policy = make(checkpoint)
    with pytest.raises(CheckpointError, match="is not a directory"):
        policy.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        policy.save(checkpoint[0], "float32")


def test_random_weights_are_a_function_of_the_seed_and_leave_the_generator_alone(policy):
    fresh = [make_random(seed) for seed in (3, 3, 4)]
    assert fresh[0] == fresh[1] != fresh[2]
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    make_random(5)
    assert torch.equal(torch.rand(1), expected)


def make_random(seed):
    policy = Policy(model_config(CONFIG), dtype="float32")
    policy.init_random(seed, std=0.02, embedding_std=1.0, bias_std=0.01)
    return policy.master_hash()


def test_weights_that_were_never_loaded_cannot_pass_for_a_model():
    policy = Policy(model_config(CONFIG), dtype="float32")
    assert torch.isnan(policy.hidden_states(*packed([3]))).all()


def test_an_unknown_dtype_names_the_known_ones():
    with pytest.raises(ValueError, match=r"policy\.dtype='float16' is unknown; use one of"):
        Policy(model_config(CONFIG), dtype="float16")
