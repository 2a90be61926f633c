"""Each key of weight_sync reaches the driver; who carries the weights follows from the devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m3rl import assemble_sync
from m3rl.assemble_sync import max_probe_error, weight_sync
from m3rl.config import Config, ConfigError
from m3rl.config_file import flatten
from m3rl.host import this_host
from m3rl.sync_transport import choose_transport, fallbacks, gpu_of
from m3rl.weight_sync.probe import Probe

TINY = "configs/tiny_cpu.yaml"
PROBED = "weight_sync.probe.every=3"


class FakePool:
    """Trainer ranks and replicas in one; notes calls."""

    num_replicas = 2

    def __init__(self, gpus: dict[str, str | None] | None = None) -> None:
        self.calls: list[Any] = []
        self._gpus = gpus or {"trainer rank 0": None}

    def gpus(self) -> dict[str, str | None]:
        return self._gpus

    def prompt_lengths(self) -> tuple[int, int]:
        return 100, 500

    def receivers(self, replica: int) -> list[str]:
        return [f"receiver {replica}"]

    def pause(self, mode: str, replica: int) -> None:
        self.calls.append(("pause", mode, replica))

    def resume(self, replica: int) -> None:
        self.calls.append(("resume", replica))

    def prompt_logprobs(self, replica: int, prompts: Any) -> Any:
        raise AssertionError("nobody probes here")

    def all(self, method: str, batch: Any) -> list[np.ndarray]:
        self.calls.append((method, batch.length_B.tolist()))
        return [np.where(batch.loss_mask_BS, -1.0 - np.arange(batch.ids_BS.shape[1]), 0.0)]

    def first(self, count: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=np.arange(i, i + 9, dtype=np.int32)) for i in range(count)]


def handed_over(monkeypatch, *words: str, pool: FakePool | None = None) -> dict[str, Any]:
    """Keyword arguments of the WeightSync that a configuration makes."""
    seen: dict[str, Any] = {}

    def make(senders: Any, replicas: Any, **options: Any) -> None:
        seen.update(options, replicas=replicas)

    monkeypatch.setattr(assemble_sync, "WeightSync", make)
    pool = pool or FakePool()
    weight_sync(Config.load(TINY, words), pool, pool, pool, host="h")  # type: ignore[arg-type]
    return seen


REACHES = {
    "timeout_s": ("7", {"timeout_s": 7.0}),
    "verify": ("false", {"verify": False}),
    "chunk_mib": ("3", {"chunk_bytes": 3 << 20}),
    "transport": ("gloo", {"backend": "gloo"}),
    "wire": ("mxfp8", {"wire": "mxfp8"}),
    "delta": ("true", {"delta_full_every": 20}),
}


@pytest.mark.parametrize("key", REACHES)
def test_a_key_changes_its_argument(monkeypatch, key):
    value, expected = REACHES[key]
    own_gpus = FakePool({"trainer rank 0": "a", "replica 0": "b", "replica 1": "c"})
    before = handed_over(monkeypatch, pool=own_gpus)
    after = handed_over(monkeypatch, f"weight_sync.{key}={value}", pool=own_gpus)
    changed = {name for name in expected if before[name] != after[name]}
    assert changed == set(expected)
    assert {name: after[name] for name in expected} == expected


@pytest.mark.parametrize("mode", ["keep", "drain", "recompute"])
def test_replicas_pause_in_the_mode_of_the_configuration(monkeypatch, mode):
    pool = FakePool()
    options = handed_over(monkeypatch, f"weight_sync.pause={mode}", pool=pool)
    options["pause"](1)
    options["resume"](1)
    assert pool.calls == [("pause", mode, 1), ("resume", 1)]
    assert options["replicas"] == {0: ["receiver 0"], 1: ["receiver 1"]}


def test_the_probe_asks_all_ranks_for_prompts_of_two_lengths(monkeypatch):
    assert handed_over(monkeypatch)["probe"] is None
    pool = FakePool()
    words = [PROBED, "weight_sync.probe.prompts=3", "weight_sync.probe.max_error=0.25"]
    probe = handed_over(monkeypatch, *words, pool=pool)["probe"]
    assert isinstance(probe, Probe)
    assert [probe.is_due(version) for version in (2, 3)] == [False, True]
    assert probe._max_error == 0.25
    scores = probe._trainer(probe._prompts)
    assert pool.calls == [("logprobs", [64, 164, 64])]
    assert [len(each) for each in scores] == [63, 163, 63]
    assert scores[0][:2].tolist() == [-2.0, -3.0]


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ([], 1e-3),
        (["policy.dtype=bfloat16"], 0.15),
        (["policy.dtype=bfloat16", "rollout.backend.engine.quantization=mxfp8"], 0.3),
        (["rollout.backend.engine.kv_dtype=float8_e4m3fn"], 0.3),
        (["rollout.backend.engine.index_dtype=float8_e4m3fn"], 0.3),
    ],
)
def test_the_bound_of_the_probe_follows_the_dtypes(words, bound):
    assert max_probe_error(Config.load(TINY, words)) == bound


def test_no_key_of_weight_sync_is_left_out():
    keys = set(flatten(Config.load(TINY).to_dict()["weight_sync"]))
    probe = {"probe.every", "probe.prompts", "probe.max_error"}
    assert keys - REACHES.keys() - probe == {"pause", "min_replicas", "delta_full_every"}


def test_without_delta_every_sync_is_full_and_with_it_every_so_many(monkeypatch):
    every = "weight_sync.delta_full_every=7"
    assert handed_over(monkeypatch, every)["delta_full_every"] == 1
    assert handed_over(monkeypatch, every, "weight_sync.delta=true")["delta_full_every"] == 7


OWN = {"trainer rank 0": "a@x", "trainer rank 1": "b@x", "replica 0": "c@y"}


def test_weights_travel_over_nccl_where_everybody_has_a_gpu_of_its_own():
    assert choose_transport("auto", OWN) == choose_transport("nccl", OWN) == "nccl"
    assert choose_transport("gloo", OWN) == "gloo"


@pytest.mark.parametrize("gpu", ["b@x", "c@x"])
def test_weights_travel_by_copy_engines_where_all_gpus_are_of_one_host(gpu):
    gpus = OWN | {"replica 0": gpu}
    assert choose_transport("auto", gpus) == choose_transport("ipc", gpus) == "ipc"


@pytest.mark.parametrize(
    ("gpus", "others"),
    [
        (OWN | {"replica 0": "c@x"}, ("nccl", "gloo")),
        (OWN | {"replica 0": "b@x"}, ("gloo",)),  # two share a GPU
        (OWN, ("gloo",)),
        (OWN | {"replica 0": None}, ()),
    ],
)
def test_what_may_carry_instead_of_the_choice_is_what_nothing_speaks_against(
    monkeypatch, gpus, others
):
    assert fallbacks("auto", gpus) == others
    assert handed_over(monkeypatch, pool=FakePool(gpus))["fallbacks"] == others
    assert fallbacks("gloo", gpus) == fallbacks("ipc", gpus) == ()


@pytest.mark.parametrize(
    ("wanted", "changed", "said"),
    [
        ("nccl", {"replica 0": None}, "replica 0 keeps its weights in the host's memory"),
        ("ipc", {"replica 0": None}, "replica 0 keeps its weights in the host's memory"),
        ("nccl", {"replica 1": "c@y"}, "replica 0 and replica 1 share one GPU"),
        ("ipc", {"replica 1": "c@y"}, r"replica 0 is on another host \(y\) than trainer rank 0"),
    ],
)
def test_what_cannot_connect_is_refused_with_who_is_in_the_way(wanted, changed, said):
    gpus = OWN | changed
    assert choose_transport("auto", gpus) == "gloo"
    with pytest.raises(ConfigError, match=f"weight_sync.transport: {wanted} .*{said}; set auto or"):
        choose_transport(wanted, gpus)


def test_what_can_connect_is_named_where_something_else_is_wanted():
    with pytest.raises(ConfigError, match="set auto or nccl or gloo"):
        choose_transport("ipc", OWN)


def test_weights_on_the_host_have_no_gpu():
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_known_by_the_same_name_however_it_is_addressed():
    name = gpu_of(torch.device("cuda"))
    assert name == gpu_of(torch.device("cuda:0"))
    assert name.endswith(f"@{this_host()}")
