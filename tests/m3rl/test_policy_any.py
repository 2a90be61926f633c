"""Policies of other architectures than M3, against transformers' own models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.kernels.packing import Packing
from m3rl.architecture import ArchitectureError
from m3rl.checkpoint import CheckpointError
from m3rl.model_layout import whole_layout
from m3rl.policy_any import TransformersPolicy
from m3rl.policy_transformers import ATTENTION
from tests.m3rl.any_models import (
    GEMMA3,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    change_config,
    config_of,
    model_of,
    write_any,
)

KINDS = {"qwen3": QWEN3, "llama": LLAMA, "qwen3_moe": QWEN3_MOE, "gemma3_text": GEMMA3}
LENGTHS = (7, 1, 12, 5)
TARGETS = torch.tensor([1, 2, 6, 9, 13, 19, 22, 24])


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(folder, transformers' model)"""
    path = tmp_path_factory.mktemp(request.param)
    return path, write_any(path, KINDS[request.param])


def make(model, dtype="float32", **options):
    policy = TransformersPolicy(model[0], dtype=dtype, **options)
    policy.load(model[0])
    return policy


def packed():
    generator = torch.Generator().manual_seed(1)
    ids_T = torch.randint(0, 97, (sum(LENGTHS),), generator=generator)
    ids_T[3] = 2  # the pad token, which is trained like any other
    return ids_T, Packing.of(LENGTHS, "cpu")


def logprobs(policy):
    return policy(*packed(), TARGETS, temperature=1.0)[0]


def alone(oracle):
    """Log-probabilities of the targets by transformers, each sample by itself."""
    values = []
    for ids in packed()[0].split(LENGTHS):
        log_p = oracle(ids[None]).logits[0].double().log_softmax(-1)
        values += [log_p.new_zeros(1), log_p[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(values)[TARGETS]


def gradients(module):
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def twin_of(oracle, dtype):
    """A second one; experts in FP64 need transformers' eager way."""
    twin = model_of(KINDS[oracle.config.model_type])
    twin.load_state_dict(oracle.state_dict())
    if dtype == torch.float64:
        twin.config._experts_implementation = "eager"
    for parameter in twin.parameters():  # the frequencies of positions stay FP32
        parameter.data = parameter.data.to(dtype)
    return twin


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("float64", 1e-7)])
def test_packed_samples_compute_and_learn_as_transformers_does_with_each_alone(
    model, dtype, bound, recomputes
):
    """In FP64 too transformers' norms and softmax of the router are FP32."""
    policy = make(model, dtype, activation_checkpointing=recomputes)
    oracle = twin_of(model[1], getattr(torch, dtype))
    mine, theirs = logprobs(policy), alone(oracle)
    torch.testing.assert_close(mine.double(), theirs, atol=bound, rtol=0)
    weights = torch.linspace(-1, 1, len(TARGETS))
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected, actual = gradients(oracle), gradients(policy.model)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        # transformers never trains the embedding of the pad token, unless the head is tied to it.
        rows = slice(None)
        if name.endswith("embed_tokens.weight"):
            rows = torch.arange(97) != 2
        assert grad.abs().max() > 0
        atol = bound * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(actual[name][rows], grad[rows], atol=atol, rtol=0, msg=name)


def test_a_sample_does_not_see_its_neighbours(model):
    policy, (ids_T, packing) = make(model), packed()
    hidden = policy.hidden_states(ids_T, packing)
    changed_T = ids_T.clone()
    changed_T[:8] = (changed_T[:8] + 1) % 97
    again = policy.hidden_states(changed_T, packing)
    # Experts multiply the rows of all samples together, in sums of any order.
    torch.testing.assert_close(again[8:], hidden[8:], atol=2e-6, rtol=0)
    assert not torch.isclose(again[:8], hidden[:8]).any(1).all()


def test_in_bf16_it_computes_with_the_bits_that_are_sent_and_fp32_masters_learn(model):
    policy = make(model, "bfloat16", activation_checkpointing=True)
    (ids_T, packing), oracle = packed(), twin_of(model[1], torch.bfloat16)
    oracle.set_attn_implementation(ATTENTION)
    theirs = oracle.model(
        ids_T[None], position_ids=packing.positions_T[None], use_cache=False, packing=packing
    ).last_hidden_state[0]
    hidden = policy.hidden_states(ids_T, packing)
    assert torch.equal(hidden, theirs)
    head = policy.architecture.head(policy.model).weight.bfloat16().float()
    log_p = (hidden[TARGETS - 1].float() @ head.T).log_softmax(-1)
    expected = log_p.gather(1, ids_T[TARGETS, None])[:, 0]
    torch.testing.assert_close(logprobs(policy), expected, atol=1e-5, rtol=0)
    logprobs(policy).sum().backward()
    assert {grad.dtype for grad in gradients(policy).values()} == {torch.float32}


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_in_bf16_are_those_of_the_rounded_weights(model, recomputes):
    """The recomputation rounds too: the same gradients with and without."""
    policy = make(model, "bfloat16", activation_checkpointing=recomputes)
    rounded, plain = make(model, "bfloat16"), make(model, "float32")
    with torch.no_grad():
        for one in (rounded, plain):
            for parameter in one.parameters():
                parameter.copy_(parameter.bfloat16())
    for one in (policy, rounded, plain):
        logprobs(one).sum().backward()
    actual = gradients(policy)
    for name, grad in gradients(rounded).items():
        assert torch.equal(actual[name], grad), name
    if "moe" not in model[1].config.model_type:  # there a rounding may choose another expert
        expected = gradients(plain)
        off = sum((actual[n] - g).square().sum() for n, g in expected.items())
        assert off <= 0.05**2 * sum(g.square().sum() for g in expected.values())


def test_the_embedding_of_a_tied_model_gets_both_gradients(tmp_path):
    model = tmp_path, write_any(tmp_path, QWEN3)
    tied = make(model)
    assert "lm_head.weight" not in {slot.name for slot in tied.layout()}
    (tmp_path / "untied").mkdir()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "untied" / "model.safetensors")
    (tmp_path / "untied" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    change_config(tmp_path / "untied", tie_word_embeddings=False)
    untied = make((tmp_path / "untied",))
    for policy in (tied, untied):
        logprobs(policy).sum().backward()
    parts = gradients(untied.model)
    both = parts["model.embed_tokens.weight"] + parts["lm_head.weight"]
    torch.testing.assert_close(gradients(tied.model)["model.embed_tokens.weight"], both)


def test_its_tensors_are_those_of_the_checkpoint_with_their_names_and_values(model):
    policy, stored = make(model), load_file(model[0] / "model.safetensors")
    assert policy.layout() == whole_layout(model[0], "float32")
    exported = dict(policy.export())
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name
        assert torch.equal(policy.wire_view(name), tensor), name
    part = policy.wire_view("model.layers.1.self_attn.o_proj.weight", ((3, 5), (0, 7)))
    assert torch.equal(part, stored["model.layers.1.self_attn.o_proj.weight"][3:5, :7])


def test_what_it_saves_transformers_loads(model, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = make(model)
    policy.save(tmp_path, "float32")
    (tmp_path / "config.json").write_bytes((model[0] / "config.json").read_bytes())
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in model[1].state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_fresh_weights_follow_the_seed_and_norms_scale_by_one(model):
    made = []
    for seed in (3, 3, 4):
        policy = TransformersPolicy(model[0], dtype="float32")
        policy.init_random(seed, std=0.1, embedding_std=1.0, bias_std=0.0)
        made.append(dict(policy.export()))
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name])
        if tensor.ndim < 2:
            # Gemma's act as 1 + w.
            assert (tensor == (0 if model[1].config.model_type == "gemma3_text" else 1)).all(), name
        else:
            assert not torch.equal(tensor, made[2][name])
            scale = 1.0 if "embed_tokens" in name else 0.1
            assert tensor.std() == pytest.approx(scale, rel=0.25), name


def test_a_frozen_copy_stays_what_it_was(model):
    policy = make(model, "bfloat16", activation_checkpointing=True)
    frozen, before = policy.frozen_copy(), logprobs(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logprobs(frozen), before)
    assert not torch.equal(logprobs(policy), before)


def test_a_sample_beyond_the_models_positions_is_refused(model):
    with pytest.raises(ValueError, match=r"65 tokens exceeds max_position_embeddings=64"):
        make(model).hidden_states(torch.zeros(65, dtype=torch.int64), Packing.of([65], "cpu"))


REFUSED = {
    "a window": ({"model_type": "mistral", "sliding_window": 16}, r"asks for sliding_window=16"),
    "a window in layers": (
        QWEN3
        | {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        r"layers of type sliding_attention",
    ),
    "soft caps": ({"model_type": "gemma2", "head_dim": 16}, r"asks for softcap"),
    "sinks": ({"model_type": "gpt_oss", "num_local_experts": 4}, r"GptOssAttention"),
    "scaled logits": ({"model_type": "cohere"}, r"changes logits behind its head"),
    "state spaces": ({"model_type": "mamba2", "head_dim": 16, "num_heads": 4}, r"linear_attention"),
    "a rope that follows the length": (
        LLAMA | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        r"rope_type dynamic",
    ),
    "other attention": ({"model_type": "bloom", "n_head": 4}, r"of its 3 layers 0 have attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_packed_samples_cannot_have_is_refused(tmp_path, case):
    kind, words = REFUSED[case]
    config_of(kind).save_pretrained(tmp_path)
    with pytest.raises(ArchitectureError, match=words):
        TransformersPolicy(tmp_path, dtype="float32")


def test_a_model_that_transformers_lacks_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen99"}))
    with pytest.raises(ArchitectureError, match="transformers cannot read"):
        TransformersPolicy(tmp_path, dtype="float32")


def test_checkpoints_that_are_not_of_the_model_are_refused(tmp_path):
    write_any(tmp_path, QWEN3)
    policy = TransformersPolicy(tmp_path, dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    for changed, words in (
        ({n: t for n, t in tensors.items() if n != name}, rf"lacks 1 of the 35 .*{name}"),
        (tensors | {"extra": torch.zeros(2)}, "extra is no tensor of the model"),
        (tensors | {name: tensors[name][:5].clone()}, rf"{name} has shape \[5, 32\]"),
        (tensors | {name: tensors[name].to(torch.int8)}, rf"{name} is stored as I8"),
        (tensors | {name: tensors[name] * torch.nan}, rf"{name} holds values that are not finite"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            policy.load(tmp_path)
