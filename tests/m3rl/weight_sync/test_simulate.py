from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from inference.config import ModelConfig
from inference.parallel.config import ParallelConfig
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.simulate import Links, Projection, simulate
from m3rl.weight_sync.trainer_layout import TrainerShards
from tests.m3rl.weight_sync.model_layouts import MODEL, REPLICAS, TRAINERS, replica, trainer

CHUNK = 1 << 20
BARE = Links(nic=100.0, nvlink=1000.0, memory=math.inf, post_s=0.0, round_s=0.0, gpus_per_node=2)
"""100 B/s between nodes of two GPUs, and nothing else that takes time."""
RELEASED = Path(__file__).parents[3] / "configs" / "models" / "minimax_m3"


def held(rows: tuple[int, int] = (0, 25), bucket: str = "pre") -> list[TensorSlot]:
    """Rows of four bytes each."""
    return [TensorSlot(f"{bucket}.w", "float32", (25,), (rows,), bucket)]


def matrix(rows: tuple[int, int] = (0, 32)) -> list[TensorSlot]:
    """Rows of 100 bytes."""
    return [TensorSlot("w", "float32", (32, 25), (rows, (0, 25)), "pre")]


def test_one_copy_over_the_network_by_hand():
    found = simulate([held()] * 2, [held()], links=BARE)
    assert found.sent_bytes == (100, 0)
    assert found.received_bytes == (100,)
    assert (found.num_copies, found.num_rounds) == (1, 1)
    assert found.seconds == pytest.approx(1.0)
    assert found.floor_s == pytest.approx(1.0)  # of the worker; the trainer ranks' is half
    assert found.balance == 2.0


def test_a_copy_inside_a_node_takes_the_faster_link():
    found = simulate([held()], [held()], links=BARE)
    assert found.seconds == pytest.approx(0.1)
    assert found.floor_s == pytest.approx(0.1)


def test_every_replica_takes_the_same_from_a_trainer_rank():
    links = dataclasses.replace(BARE, gpus_per_node=1)
    found = simulate([held()], [held()], num_replicas=3, links=links)
    assert found.sent_bytes == (300,)
    assert found.seconds == found.floor_s == pytest.approx(3.0)


def test_what_two_workers_of_a_node_want_enters_it_once():
    senders = [matrix((0, 16)), matrix((16, 32))]
    alone = simulate(senders, [matrix()] * 2, links=BARE, is_relayed=False)
    assert alone.sent_bytes == (3200, 3200)
    assert alone.seconds == pytest.approx(32.0)
    shared = simulate(senders, [matrix()] * 2, links=BARE)
    assert shared.sent_bytes == (1600, 1600)
    assert shared.received_bytes == (3200, 3200)
    # 16 s over the network, then half of the matrix to the other worker at 1000 B/s
    assert shared.seconds == pytest.approx(16.0 + 1.6)
    assert alone.floor_s == shared.floor_s == pytest.approx(16.0)


def test_passes_hide_behind_the_next_round_s_copies():
    senders = [matrix((0, 16)), matrix((16, 32))]
    found = simulate(senders, [matrix()] * 2, links=BARE, chunk_bytes=400)
    assert found.num_rounds == 4
    assert found.seconds == pytest.approx(16.0 + 1.6 / 4)


def test_a_round_costs_its_latency_and_its_messages():
    links = dataclasses.replace(BARE, round_s=2.0, post_s=0.5, pack_bytes=0)
    one = simulate([held()], [held()], links=links)
    assert one.seconds == pytest.approx(2.0 + 0.5)
    layout = [*held(bucket="pre"), *held(bucket="post")]
    two = simulate([layout], [layout], links=links)
    assert (two.num_rounds, two.seconds) == (2, pytest.approx(5.0))


def test_small_ops_of_a_pair_are_one_message():
    layout = [TensorSlot(f"w{i}", "float32", (25,), whole((25,)), "pre") for i in range(8)]
    links = dataclasses.replace(BARE, post_s=0.5)
    assert simulate([layout], [layout], links=links).seconds == pytest.approx(0.8)
    apart = dataclasses.replace(links, pack_bytes=99)
    assert simulate([layout], [layout], links=apart).seconds == pytest.approx(4.0)


def test_memory_is_read_and_written_beside_the_links():
    links = dataclasses.replace(BARE, memory=100.0)
    # The worker reads 100 bytes, writes 100, and its hash reads 100; the trainer reads and writes.
    assert simulate([held()], [held()], links=links).seconds == pytest.approx(3.0)


def test_mxfp8_on_the_wire_is_33_bytes_a_block():
    sent = TensorSlot("w", "bfloat16", (2, 64), whole((2, 64)), "pre")
    stored = dataclasses.replace(sent, storage="mxfp8")
    assert simulate([[sent]], [[stored]], links=BARE).received_bytes == (256,)
    assert simulate([[sent]], [[stored]], links=BARE, wire="mxfp8").received_bytes == (132,)
    assert simulate([[sent]], [[sent]], links=BARE, wire="mxfp8").received_bytes == (256,)
    with pytest.raises(ValueError, match="wire='fp4' is not known; use one of"):
        simulate([[sent]], [[sent]], wire="fp4")


def test_replicas_take_from_the_ranks_by_turns():
    links = dataclasses.replace(BARE, gpus_per_node=1)
    found = simulate([held()] * 2, [held()], num_replicas=2, links=links)
    assert found.sent_bytes == (100, 100)
    assert found.seconds == pytest.approx(1.0)
    alike = simulate([held()] * 2, [held()], num_replicas=2, takes_turns=False, links=links)
    assert alike.sent_bytes == (200, 0)
    assert alike.seconds == pytest.approx(2.0)


def test_a_bucket_that_stands_for_several_begins_with_several_ranks():
    layout = held(bucket="layer.0")
    once = simulate([layout] * 4, [layout], repeats={"layer.0": 4}, links=BARE)
    many = [each for i in range(4) for each in held(bucket=f"layer.{i}")]
    assert once == simulate([many] * 4, [many], links=BARE)
    assert once.balance <= 2.0  # all from the same one would be 4


def one_of_each_kind(model: ModelConfig) -> tuple[ModelConfig, dict[str, int]]:
    """First layers dense, the others alike: the model with two layers, and how many each is."""
    num_dense = model.num_hidden_layers - len(model.moe_layers)
    pick = (0, model.num_hidden_layers - 1)
    small = dataclasses.replace(
        model,
        num_hidden_layers=2,
        layer_types=tuple(model.layer_types[i] for i in pick),
        mlp_layer_types=tuple(model.mlp_layer_types[i] for i in pick),
    )
    return small, {"layer.0": num_dense, "layer.1": len(model.moe_layers)}


@pytest.mark.parametrize("split", [TRAINERS[0], TRAINERS[3]], ids=str)
@pytest.mark.parametrize("parallel", REPLICAS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [4096, CHUNK])
def test_one_layer_of_a_kind_stands_for_all(
    split: TrainerShards, parallel: ParallelConfig, chunk_bytes: int
):
    small, repeats = one_of_each_kind(MODEL)
    options = {"num_replicas": 2, "chunk_bytes": chunk_bytes, "links": Links(gpus_per_node=4)}
    every = simulate(trainer(split), replica(parallel), **options)
    once = simulate(trainer(split, small), replica(parallel, small), repeats=repeats, **options)
    assert once.sent_bytes == every.sent_bytes
    assert sum(once.received_bytes) == sum(every.received_bytes)
    assert once.num_rounds == pytest.approx(every.num_rounds, rel=0.1)
    assert once.seconds == pytest.approx(every.seconds, rel=0.1)


def released(
    split: TrainerShards, parallel: ParallelConfig, num_replicas: int, **options: str
) -> Projection:
    model, repeats = one_of_each_kind(ModelConfig.from_pretrained(RELEASED))
    quantization = options.pop("quantization", "none")
    return simulate(
        trainer(split, model),
        replica(parallel, model, quantization),
        num_replicas=num_replicas,
        repeats=repeats,
        **options,
    )


@pytest.mark.parametrize(
    ("split", "parallel", "num_replicas", "options", "floor_s"),
    [
        (TrainerShards(4), ParallelConfig(1, 4), 1, {"quantization": "mxfp8"}, 0.59),
        (TrainerShards(8, ep=8), ParallelConfig(1, 8), 1, {}, 2.13),
        (TrainerShards(16, ep=8), ParallelConfig(1, 16), 1, {}, 1.10),
        (TrainerShards(32, ep=32), ParallelConfig(4, 4), 2, {}, 1.10),
        (
            TrainerShards(64, ep=8),
            ParallelConfig(1, 8),
            8,
            {"quantization": "mxfp8", "wire": "mxfp8"},
            1.13,
        ),
        (TrainerShards(64, replicas=2, ep=8), ParallelConfig(1, 16), 4, {}, 1.10),
        (TrainerShards(192, ep=64), ParallelConfig(1, 16), 4, {}, 1.10),
        (TrainerShards(128, ep=8), ParallelConfig(1, 8), 16, {}, 2.13),
        (TrainerShards(7, replicas=7), ParallelConfig(), 3, {}, 17.05),
        (TrainerShards(32, replicas=32), ParallelConfig(4, 4), 8, {}, 4.39),
        (TrainerShards(64, replicas=64), ParallelConfig(1, 8), 8, {}, 2.13),
        (TrainerShards(128, replicas=128), ParallelConfig(16, 1), 8, {}, 1.07),
    ],
    ids=str,
)
def test_the_real_model_is_within_twice_the_floor_and_in_balance(
    split, parallel, num_replicas, options, floor_s
):
    found = released(split, parallel, num_replicas, **options)
    assert found.floor_s == pytest.approx(floor_s, abs=0.01)
    assert found.seconds <= 1.5 * found.floor_s
    assert found.balance <= 1.05
