"""What the policy gives to the outside: exported weights, and those that a sync sends."""

import pytest
import torch

from inference.models.weights import published_tensors
from m3rl.weight_sync.plan import make_plan
from tests.m3rl.test_policy import CONFIG, make
from tests.m3rl.weight_sync.sync_fakes import wire_hash_of
from tests.tiny_models import model_config, random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("wire")
    return path, random_checkpoint(path, CONFIG, seed=0)


def test_export_gives_back_what_was_loaded(checkpoint):
    policy = make(checkpoint)
    exported = dict(policy.export())
    assert list(exported) == [spec.name for spec in published_tensors(model_config(CONFIG))]
    for name, tensor in checkpoint[1].items():
        assert torch.equal(exported[name], tensor), name
    in_bf16 = dict(policy.export("bfloat16"))
    assert in_bf16["lm_head.weight"].dtype == torch.bfloat16
    assert in_bf16["model.layers.1.block_sparse_moe.gate.weight"].dtype == torch.float32


def test_the_layout_names_every_tensor_with_its_wire_dtype(checkpoint):
    policy = make(checkpoint, "bfloat16")
    for slot in policy.layout():
        tensor = policy.wire_view(slot.name)
        assert str(tensor.dtype) == f"torch.{slot.dtype}"
        assert tuple(tensor.shape) == slot.shape == tuple(stop for _, stop in slot.bounds)
        assert torch.equal(tensor, checkpoint[1][slot.name].to(tensor.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_sent_of_a_tensor_is_the_masters_memory_where_nothing_is_rounded(checkpoint, dtype):
    policy = make(checkpoint, dtype)
    for slot in policy.layout():
        view, master = policy.wire_view(slot.name), policy._master(slot.name)
        shares = view.data_ptr() == master.data_ptr()
        assert shares == (slot.dtype == "float32"), slot.name
        assert view.is_contiguous()
    assert policy.wire_stays == (dtype == "float32")


def test_a_rectangle_of_a_tensor_is_cut_from_it(checkpoint):
    name = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    for dtype in (torch.float32, torch.bfloat16):
        policy = make(checkpoint, str(dtype).removeprefix("torch."))
        part = policy.wire_view(name, ((2, 7), (4, 20)))
        assert torch.equal(part, checkpoint[1][name].to(dtype)[2:7, 4:20])
    with pytest.raises(KeyError, match="no published tensor"):
        policy.wire_view("model.layers.2.mlp.gate.weight")


def test_updates_and_loads_leave_what_is_sent_where_it_is(checkpoint):
    policy = make(checkpoint)
    views = {slot.name: policy.wire_view(slot.name) for slot in policy.layout()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(views[name], tensor) for name, tensor in policy.export("float32"))
    policy.load(checkpoint[0])
    assert all(torch.equal(views[name], tensor) for name, tensor in checkpoint[1].items())


def test_the_master_hash_covers_every_tensor_and_the_bias_and_is_that_of_an_fp32_sync(checkpoint):
    policy, in_bf16 = make(checkpoint), make(checkpoint, "bfloat16")
    layout = policy.layout()
    expected = wire_hash_of(checkpoint[1], make_plan([layout], [layout], 1 << 20).ops)
    assert policy.master_hash() == f"{expected:016x}" == in_bf16.master_hash()
    with torch.no_grad():
        bias = policy.model.model.layers[3].mlp.gate.e_score_correction_bias
        bias[5] = torch.nextafter(bias[5], torch.tensor(1.0))
    assert policy.master_hash() != f"{expected:016x}"
