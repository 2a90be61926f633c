"""Syncs of merged adapters: all once, then what they adapt, verified by the hash of all."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference.config import EngineConfig
from inference.engine import Engine
from inference.kernels.mxfp8 import dequantize
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.send import Sender
from tests.m3rl.lora_cases import CONFIG, LORA, make, shake
from tests.m3rl.weight_sync.sync_fakes import FakeEngine, local_sync, store_without_sockets
from tests.tiny_models import model_config, random_checkpoint

MXFP8 = replace(LORA, mxfp8_experts=True)
EXPERT = "model.layers.1.block_sparse_moe.experts.0.w1.weight"


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


class Rank:
    """A trainer rank as the driver sees it."""

    def __init__(self, policy, *, fixed=True):
        self.reads = []
        self.policy = policy
        self.sender = Sender(
            0,
            policy.layout(),
            self.read,
            stays=policy.wire_stays,
            fixed=policy.fixed_names if fixed else (),
        )

    def read(self, name, bounds):
        self.reads.append(name)
        return self.policy.wire_view(name, bounds)

    def __getattr__(self, name):
        return getattr(self.sender, name)


class Waits(TorchDispatchMode):
    """Counts what would have the host wait for a GPU: values that it reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def assert_same(engine, policy):
    for name, tensor in policy.export():
        assert torch.equal(engine.tensors[name], tensor), name


@pytest.mark.parametrize("lora", [LORA, MXFP8], ids=["stays", "read anew"])
def test_after_the_first_sync_only_adapted_weights_travel(model, monkeypatch, lora):
    monkeypatch.setattr("m3rl.weight_sync.delta.PAYS_BELOW", 1.0)  # of a model this small
    policy = make(model, "bfloat16", lora)
    rank, engine = Rank(policy), FakeEngine(policy.layout())
    sync, _, _ = local_sync({0: [engine]}, [rank], delta_full_every=9)
    full = sync.sync(0)
    assert_same(engine, policy)
    for version in (1, 2):
        before = policy.wire_state()
        shake(policy, seed=version)
        report = sync.sync(version)
        assert report.num_deltas == 1
        assert report.checksum_ok
        assert report.wire_hash != full.wire_hash
        changed = sum(int((policy._own(n)[0] != old).sum()) for n, old in before.items())
        assert changed > 1000
        # Place and value of each, a count for each tile of all.
        assert report.num_bytes == 4 * changed + 4 * len(sync.plan(0).ops)
        assert_same(engine, policy)


@pytest.mark.parametrize("lora", [LORA, MXFP8], ids=["stays", "read anew"])
def test_a_sync_reads_weights_without_waiting_for_the_device(model, lora):
    policy = make(model, "bfloat16", lora)
    if lora.mxfp8_experts:
        with Waits() as waits:
            dequantize(*policy._mxfp8(EXPERT), torch.bfloat16)
        assert waits.count == 1, "it looks at the scales"
    with Waits() as waits:
        for slot in policy.layout():
            policy.wire_view(slot.name, slot.bounds)
    assert waits.count == 0


def test_of_fixed_weights_nothing_is_remembered(model, monkeypatch):
    """Or a trainer would hold its frozen experts twice."""
    monkeypatch.setattr("m3rl.weight_sync.delta.PAYS_BELOW", 1.0)
    held = {}
    for fixed in (False, True):
        policy = make(model, "bfloat16")
        rank, engine = Rank(policy, fixed=fixed), FakeEngine(policy.layout())
        sync, _, _ = local_sync({0: [engine]}, [rank], delta_full_every=9)
        sync.sync(0)
        shake(policy)
        reports = [sync.sync(1), sync.sync(2)]
        assert [report.num_deltas for report in reports] == [1, 1]
        assert_same(engine, policy)
        (snapshot,) = rank.sender._snapshots.values()
        held[fixed] = {op.name for op in snapshot._held._parts}
    names = {slot.name for slot in policy.layout()}
    assert held[False] == names
    assert held[True] == names - policy.fixed_names
    assert len(held[True]) == 12


def test_a_fixed_weight_that_changed_all_the_same_is_found_by_the_hash(model, monkeypatch):
    monkeypatch.setattr("m3rl.weight_sync.delta.PAYS_BELOW", 1.0)
    policy = make(model, "bfloat16")
    rank, engine = Rank(policy), FakeEngine(policy.layout())
    sync, _, _ = local_sync({0: [engine]}, [rank], delta_full_every=9)
    sync.sync(0)
    shake(policy)
    policy.model.lm_head.weight.data[3, 5] += 1.0
    report = sync.sync(1)
    assert report.num_deltas == 0  # all was sent in the end
    assert report.checksum_mismatches == 1
    assert_same(engine, policy)


def test_the_runtime_takes_merged_weights_and_quantises_experts_to_the_trainers_values(
    model, monkeypatch
):
    monkeypatch.setattr("m3rl.weight_sync.delta.PAYS_BELOW", 1.0)
    policy = make(model, "bfloat16", MXFP8)
    settings = EngineConfig(num_pages=32, dtype="bfloat16", quantization="mxfp8")
    engine = Engine(model_config(CONFIG), settings)
    options = {"pause": lambda _: engine.pause("keep"), "resume": lambda _: engine.resume()}
    options |= {"wire": "mxfp8", "delta_full_every": 9}
    sync, _, _ = local_sync({0: [engine]}, [Rank(policy)], **options)
    for version in range(3):
        report = sync.sync(version)
        assert report.num_deltas == min(version, 1)
        assert report.checksum_ok
        shake(policy, seed=version)
