"""Trainer ranks write one checkpoint together, over gloo."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inference.config import ModelConfig
from inference.models.checkpoint import list_tensors
from inference.models.weights import published_tensors, read_checkpoint, transformers_placement
from m3rl.parallel.save import TensorFile, deal, plan_rounds
from m3rl.parallel.shards import Shards
from m3rl.rendezvous import Rendezvous
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.trainer_layout import TrainerShards
from tests.forked import PROCESSES
from tests.m3rl import save_process
from tests.m3rl.parallel_process import on_ranks
from tests.m3rl.rank_cases import CONFIG, SETTINGS, start
from tests.m3rl.save_process import MAX_SHARD_BYTES, NO_SPACE
from tests.tiny_models import model_config, random_checkpoint

MODEL = model_config(CONFIG)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def test_the_largest_tensors_are_dealt_first_each_to_an_owner():
    sizes = {"a": 2, "b": 5, "c": 4, "d": 3, "e": 9}
    owners = {"a": [0, 1], "b": [0, 1], "c": [0, 1], "d": [1, 2], "e": [2]}
    # e -> 2; b -> 0, c -> 1; d -> 1 (4 there, 9 on 2); a -> 0 (5 there, 7 on 1)
    assert deal(sizes, owners, 3) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_rank_writes_one_file_a_round_none_larger_than_asked_but_for_a_single_tensor():
    sizes = {"a": 2, "b": 3, "c": 9, "d": 1, "e": 4}
    assert plan_rounds([["a", "b", "c", "d"], ["e"], []], sizes, 5) == [
        [TensorFile(0, ("a", "b"), 5), TensorFile(1, ("e",), 4)],
        [TensorFile(0, ("c",), 9)],
        [TensorFile(0, ("d",), 1)],
    ]


def test_sixteen_ranks_write_equal_shares_of_m3():
    config = ModelConfig.from_pretrained("configs/models/minimax_m3")
    slots = [
        TensorSlot(s.name, "float32", s.shape, whole(s.shape), s.bucket)
        for s in published_tensors(config)
    ]
    mesh = SimpleNamespace(rank=0, size=16, split=TrainerShards(16, ep=8))
    shards = Shards(slots, transformers_placement(config), mesh)
    sizes = {slot.name: shards.num_bytes(slot.name, torch.float32) for slot in slots}
    owners = {slot.name: shards.owners(slot.name) for slot in slots}
    shares = [sum(sizes[n] for n in names) for names in deal(sizes, owners, 16)]
    assert sum(shares) > 1.6e12
    # Embedding and head, 4.6 GiB each, are not cut.
    assert max(shares) < 1.02 * sum(shares) / 16


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "saved").mkdir()
    return folder, on_ranks(save_process.save, 4, model, replace(SETTINGS, ep=2), folder)


def test_every_rank_writes_files_of_its_own_and_together_they_are_the_model(saved):
    folder, told = saved
    files = sorted(file.name for file in (folder / "saved").glob("*.safetensors"))
    assert sorted(name for rank in told for name in rank["written"]) == files
    assert all(len(rank["written"]) > 1 for rank in told)
    weights = told[0]["weights"]
    assert not any(rank["weights"] for rank in told[1:])
    for name, tensor in read_checkpoint(folder / "saved", MODEL):
        assert torch.equal(tensor, torch.from_numpy(weights[name])), name
    assert start(folder / "saved").master_hash() == told[0]["hash"]
    stored = list_tensors(folder / "saved")
    assert list(stored) == [spec.name for spec in published_tensors(MODEL)]
    for file in (folder / "saved").glob("*.safetensors"):
        in_file = [weights[name].nbytes for name, one in stored.items() if one.file == file]
        assert sum(in_file) <= MAX_SHARD_BYTES or len(in_file) == 1


def test_a_model_in_bf16_is_rounded_once_and_keeps_the_router_in_fp32(saved):
    folder, told = saved
    specs = {spec.name: spec for spec in published_tensors(MODEL)}
    for name, tensor in read_checkpoint(folder / "model", MODEL):
        weight = torch.from_numpy(told[0]["weights"][name])
        expected = weight if specs[name].is_fp32 else weight.bfloat16()
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    assert sorted(p.name for p in folder.iterdir()) == ["model", "saved"]


def test_what_one_rank_cannot_write_fails_on_all_and_leaves_what_was_there(model, tmp_path):
    (tmp_path / "present").mkdir()
    (tmp_path / "thesis").mkdir()
    for folder in ("state", "optimizer", "after_state"):
        (tmp_path / folder).mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("older")
    told = on_ranks(save_process.fail, 2, model, SETTINGS, tmp_path)
    assert told[0] == told[1]
    found = told[0]
    assert f"there is no {tmp_path / 'other_host' / 'absent'}" in found["absent"]
    assert found["absent"].startswith("trainer rank 1 on ")
    assert "that trainer rank 1 wrote, is not there" in found["scattered"]
    assert all("file system" in found[case] for case in ("absent", "scattered"))
    assert found["again"] is None, "a failure leaves the ranks in step"
    assert found["full"].startswith("trainer rank 1 on ")
    assert NO_SPACE in found["full"]
    assert (tmp_path / "model" / "model.safetensors").read_text() == "older"
    for case, lost in (("state", "state/ranks/00001.pt"), ("optimizer", "optimizer/optimizer")):
        assert found[case].startswith("trainer rank 1 on ")
        assert str(tmp_path / lost) in found[case]
        assert found[case].endswith(NO_SPACE)
    assert found["after_state"] is None
    assert "holds thesis.tex" in found["foreign"]
    assert found["after"] is None
    assert not list(tmp_path.glob(".writing_*"))


def test_ranks_do_not_wait_for_one_that_died_while_it_wrote(model, tmp_path):
    meeting = Rendezvous("127.0.0.1", 60.0)
    args = (2, f"tcp://{meeting.host}:{meeting.port}", model, SETTINGS, tmp_path)
    ranks = [
        PROCESSES.Process(target=save_process.die, args=(rank, *args), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 9]
    waited_s, _ = (tmp_path / "error0").read_text().split()
    assert float(waited_s) < SETTINGS.timeout_s / 2
