import numpy as np
import pytest
import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTopKRouter

import m3rl.policy
from inference.models.weights import write_checkpoint
from m3rl.checkpoint import CheckpointError
from m3rl.grpo.replay import RoutingStats, recorded_routing
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


def make(checkpoint, dtype="float32", replay_routing=False):
    policy = Policy(
        model_config(CONFIG), dtype=dtype, attention="sdpa", replay_routing=replay_routing
    )
    policy.load(checkpoint[0])
    return policy


@pytest.fixture(scope="module")
def policy(checkpoint):
    return make(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return transformers_model(CONFIG, checkpoint[1])


def random_rows(lengths, width=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.tensor(lengths)
    ids = torch.randint(1, 97, (len(lengths), width or max(lengths)), generator=generator)
    ids[torch.arange(ids.shape[1]) >= length_B[:, None]] = 0
    return ids, length_B


def logits(policy, ids_BS, length_B):
    return policy.hidden_states(ids_BS, length_B).float() @ policy.model.lm_head.weight.T


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 24])
def test_logits_equal_transformers(policy, oracle, length):
    # Block 4 and top-k 2: from length 9 on the sparse layers drop blocks.
    ids, length_B = random_rows([length])
    actual, expected = logits(policy, ids, length_B), oracle(ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


# BR-029
def test_no_mask_and_positions_give_what_transformers_computes_with_a_padding_mask(policy, oracle):
    ids, length_B = random_rows([21, 13, 4])
    mask = (torch.arange(21) < length_B[:, None]).long()
    expected = oracle(ids, attention_mask=mask).logits
    actual = logits(policy, ids, length_B)
    is_real = mask.bool()
    torch.testing.assert_close(actual[is_real], expected[is_real], atol=1e-5, rtol=0)


# BR-029
def test_a_padded_row_computes_as_if_it_stood_alone(policy):
    ids, length_B = random_rows([21, 13, 8, 1])
    together = policy.hidden_states(ids, length_B)
    for row, length in enumerate(length_B.tolist()):
        alone = policy.hidden_states(ids[row : row + 1, :length], length_B[row : row + 1])
        torch.testing.assert_close(together[row, :length], alone[0], atol=1e-5, rtol=0)


# BR-029
def test_left_padding_is_refused(policy):
    ids, _ = random_rows([10, 10])
    ids[1, :3] = 0
    with pytest.raises(ValueError, match="padded on the right"):
        policy.hidden_states(ids, torch.tensor([10, 7]))


@pytest.mark.parametrize("lengths", [[0, 5], [5, 6]])
def test_impossible_lengths_are_refused(policy, lengths):
    ids, _ = random_rows([5, 5])
    with pytest.raises(ValueError, match=r"must lie in 1\.\.5"):
        policy.hidden_states(ids, torch.tensor(lengths))


def test_rows_beyond_the_models_context_are_refused(policy):
    ids, length_B = random_rows([513])
    with pytest.raises(ValueError, match="exceed max_position_embeddings=512"):
        policy.hidden_states(ids, length_B)


# BR-027
def test_logprobs_stand_at_their_token_and_do_not_cross_rows(policy, oracle):
    # A = [5, 6, 7] and B = [8, 9]: targets are 6, 7 | 9, never 8 from A or 5 from B.
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    together, _ = policy(ids, torch.tensor([3, 2]), mask, temperature=1.0)
    log_p_a = oracle(torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)[0]
    log_p_b = oracle(torch.tensor([[8, 9]])).logits.log_softmax(-1)[0]
    expected = torch.stack([log_p_a[0, 6], log_p_a[1, 7], log_p_b[0, 9]])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)
    shifted = torch.stack([log_p_a[1, 6], log_p_a[2, 7], log_p_b[1, 9]])
    assert (together - shifted).abs().mean() > 0.1


# BR-020
def test_temperature_divides_the_logits(policy, oracle):
    ids, length_B = random_rows([12])
    mask = torch.arange(12)[None] >= 5
    actual, entropy = policy(ids, length_B, mask, temperature=0.7)
    log_p = (oracle(ids).logits / 0.7).log_softmax(-1)[0, 4:11]
    torch.testing.assert_close(actual, log_p.gather(-1, ids[0, 5:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)


def test_the_first_token_of_a_row_cannot_be_trained_on(policy):
    with pytest.raises(ValueError, match="first token"):
        policy(torch.tensor([[5, 6]]), torch.tensor([2]), torch.ones(1, 2).bool(), temperature=1.0)


def test_a_bf16_policy_computes_with_the_values_that_go_over_the_wire(checkpoint):
    ids, length_B = random_rows([17, 9])
    policy, rounded = make(checkpoint, "bfloat16"), make(checkpoint, "bfloat16")
    masters = rounded.model.state_dict()
    for name, tensor in rounded.wire_state().items():
        masters[name].copy_(tensor)
    hidden = policy.hidden_states(ids, length_B)
    assert torch.equal(hidden, rounded.hidden_states(ids, length_B))
    assert not torch.equal(hidden.float(), make(checkpoint).hidden_states(ids, length_B))


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

    real = m3rl.policy.router
    monkeypatch.setattr(m3rl.policy, "router", spy)
    policy.hidden_states(*random_rows([6]))
    assert seen[0] == (torch.float32, torch.float32, True)


def test_gradients_reach_fp32_masters_through_the_rounding(checkpoint):
    policy = make(checkpoint, "bfloat16")
    ids, length_B = random_rows([17])
    mask = torch.arange(17)[None] >= 4
    policy(ids, length_B, mask, temperature=1.0)[0].sum().backward()
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
    stats = RoutingStats.zeros(NUM_MOE, NUM_EXPERTS)
    policy.hidden_states(*random_rows([11, 6]), stats=stats)
    assert stats.load_LE[0, 3] == 17
    assert stats.load_LE.sum(-1).tolist() == [17 * TOPK] * NUM_MOE


def own_routing(policy, ids, length_B, monkeypatch):
    """Records [length - 1, layers, A] of what the policy chooses itself."""
    chosen = []
    real = m3rl.policy.router

    def spy(*args, **options):
        weights, out = real(*args, **options)
        chosen.append(out)
        return weights, out

    with monkeypatch.context() as patched:
        patched.setattr(m3rl.policy, "router", spy)
        policy.hidden_states(ids, length_B)
    ids_BSLA = torch.stack(chosen, 1).reshape(*ids.shape, NUM_MOE, TOPK).numpy().astype(np.uint8)
    return [ids_BSLA[b, : n - 1] for b, n in enumerate(length_B.tolist())]


def lay_out(records, length_B, width):
    return recorded_routing(
        records, length_B.numpy(), width, num_layers=NUM_MOE, topk=TOPK, num_experts=NUM_EXPERTS
    )


def test_replaying_its_own_experts_changes_no_bit(checkpoint, monkeypatch):
    policy = make(checkpoint, replay_routing=True)
    ids, length_B = random_rows([14, 9])
    record = lay_out(own_routing(policy, ids, length_B, monkeypatch), length_B, 14)
    stats = RoutingStats.zeros(NUM_MOE, NUM_EXPERTS)
    replayed = policy.hidden_states(ids, length_B, record=record, stats=stats)
    assert torch.equal(replayed, policy.hidden_states(ids, length_B))
    metrics = stats.metrics(is_replayed=True)
    assert metrics["m3/router_agreement"] == 1.0
    assert metrics["m3/router_replay_coverage"] == pytest.approx((13 + 8) / (14 + 9))


def test_replayed_experts_are_used_and_the_router_still_learns(checkpoint, monkeypatch):
    policy = make(checkpoint, replay_routing=True)
    ids, length_B = random_rows([14])
    (own,) = own_routing(policy, ids, length_B, monkeypatch)
    other = (own + 1) % NUM_EXPERTS
    record = lay_out([other], length_B, 14)
    stats = RoutingStats.zeros(NUM_MOE, NUM_EXPERTS)
    replayed = policy.hidden_states(ids, length_B, record=record, stats=stats)
    assert not torch.allclose(replayed, policy.hidden_states(ids, length_B), atol=1e-3)
    expected = np.bincount(other[:, 0].ravel(), minlength=NUM_EXPERTS)
    assert (stats.load_LE[0].numpy() - expected).sum() == TOPK  # the last token chose for itself
    replayed.sum().backward()
    assert policy.model.model.layers[1].mlp.gate.weight.grad.abs().max() > 0
    # Without the switch the record is only compared with.
    bystander = make(checkpoint)
    plain = bystander.hidden_states(ids, length_B, record=record)
    assert torch.equal(plain, bystander.hidden_states(ids, length_B))


def test_routers_are_replaced_in_this_policy_only(checkpoint, oracle, policy):
    ids, length_B = random_rows([6])
    oracle(ids)
    assert MiniMaxM3VLTopKRouter.forward is ROUTER_CLASS_FORWARD
    other = make(checkpoint)
    with torch.no_grad():
        other.model.model.layers[1].mlp.gate.weight.neg_()
    before = policy.hidden_states(ids, length_B)
    assert not torch.equal(other.hidden_states(ids, length_B), before)
    assert torch.equal(policy.hidden_states(ids, length_B), before)


def test_a_frozen_copy_has_weights_and_routers_of_its_own(checkpoint):
    policy = make(checkpoint)
    copy = policy.frozen_copy()
    ids, length_B = random_rows([9])
    before = copy.hidden_states(ids, length_B)
    with torch.no_grad():
        for tensor in policy.model.state_dict().values():
            tensor.mul_(-1.5)
    assert torch.equal(copy.hidden_states(ids, length_B), before)
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
    ids = torch.tensor([[5, 2, 7, 9]])
    mask = torch.tensor([[False, False, True, True]])
    policy(ids, torch.tensor([4]), mask, temperature=1.0)[0].sum().backward()
    grad = policy.model.model.embed_tokens.weight.grad
    assert grad[2].abs().max() > 0
    assert grad[50].abs().max() == 0


# BR-006
def test_a_checkpoint_with_values_that_are_not_finite_is_refused(tmp_path):
    tensors = random_checkpoint(tmp_path / "good", CONFIG, seed=0)
    tensors["lm_head.weight"][3, 3] = torch.inf
    write_checkpoint(tmp_path / "bad", tensors.items(), max_shard_bytes=1 << 30)
    policy = Policy(model_config(CONFIG), dtype="float32", attention="sdpa", replay_routing=False)
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
    policy = Policy(model_config(CONFIG), dtype="float32", attention="sdpa", replay_routing=False)
    policy.init_random(seed, std=0.02, embedding_std=1.0, bias_std=0.01)
    return policy.master_hash()


def test_weights_that_were_never_loaded_cannot_pass_for_a_model():
    policy = Policy(model_config(CONFIG), dtype="float32", attention="sdpa", replay_routing=False)
    assert torch.isnan(policy.hidden_states(*random_rows([3]))).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float16"}, "policy.dtype='float16'"), ({"attention": "flash"}, "use one of")],
)
def test_unknown_options_name_the_known_ones(change, message):
    options = {"dtype": "float32", "attention": "sdpa", "replay_routing": False} | change
    with pytest.raises(ValueError, match=message):
        Policy(model_config(CONFIG), **options)
