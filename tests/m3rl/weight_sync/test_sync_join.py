"""A replica that comes late takes what a READY one serves, else what the trainer has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from m3rl.errors import M3rlError
from m3rl.rollout.m3_replica import EngineTarget
from m3rl.types import Receiver
from m3rl.weight_sync import hand_over
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import BusyError, SyncError
from m3rl.weight_sync.hand_over import Piece
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.joining import SYNCED, TAKEN, GivingEngine, phases
from tests.m3rl.weight_sync.sync_fakes import (
    EMBEDDING,
    EXPERT,
    FakeEngine,
    LocalSenders,
    LocalWorker,
    TrainerRank,
    assert_holds,
    layout,
    store_without_sockets,
)
from tests.m3rl.weight_sync.test_sync_engine import Rank
from tests.m3rl.weight_sync.test_sync_pauses import RAW, new_replica, request
from tests.m3rl.weight_sync.test_sync_pauses import Worker as ReplicaWorker
from tests.tiny_models import model_config, random_checkpoint, random_tensors, tiny_config


def local_driver(
    engines: dict[int, FakeEngine], **options
) -> tuple[WeightSync, LocalSenders, dict[int, LocalWorker]]:
    senders = LocalSenders([TrainerRank(0, 1)])
    workers = {number: LocalWorker(engine) for number, engine in engines.items()}
    sync = WeightSync(
        senders,
        workers,
        pause=lambda number: engines[number].pause(),
        resume=lambda number: engines[number].resume(),
        host="127.0.0.1",
        timeout_s=5.0,
        min_replicas=0,
        verify=True,
        **options,
    )
    for number in engines:
        sync.connect(number)
    return sync, senders, workers


@pytest.fixture
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def newcomer(engines: dict[int, FakeEngine], number: int, **options) -> LocalWorker:
    engines[number] = GivingEngine(layout(), **options)
    return LocalWorker(engines[number])


@pytest.mark.usefixtures("_store_without_sockets")
@pytest.mark.parametrize("chunk_bytes", [64, 130, 1 << 20])
@pytest.mark.parametrize("has_shadow", [False, True])
def test_weights_come_whole_whatever_travels_at_a_time(has_shadow, chunk_bytes):
    engines = {r: GivingEngine(layout(), has_shadow=has_shadow) for r in range(2)}
    sync, senders, _ = local_driver(engines, chunk_bytes=chunk_bytes)
    senders.load(3)
    sync.sync(1)
    if has_shadow:  # what lies there is not what serves
        engines[0].loaded[EMBEDDING].zero_()
    senders.load(4)
    sync.bring(1, 1, newcomer(engines, 1, has_shadow=has_shadow))
    assert_holds(engines[1].tensors, layout(), 3)
    assert (engines[1].version, engines[1].serves, engines[1].paused) == (1, True, False)
    assert engines[0].events[-1] == "resume"  # of the sync: it was not disturbed since
    assert sync.sync(2).ready == (0, 1)
    assert_holds(engines[1].tensors, layout(), 4)


@pytest.mark.usefixtures("_store_without_sockets")
@pytest.mark.parametrize("end", [0, 1])
def test_what_is_not_in_one_piece_is_copied_at_that_end(end):
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines, chunk_bytes=70)
    senders.load(3)
    sync.sync(1, [0])
    for name, tensor in engines[end].tensors.items():
        engines[end].tensors[name] = tensor.T.contiguous().T if tensor.ndim == 2 else tensor
    senders.load(4)
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    assert_holds(engines[1].tensors, layout(), 3)


@pytest.mark.usefixtures("_store_without_sockets")
def test_of_peers_that_nobody_has_missed_yet_the_next_one_gives(monkeypatch):
    engines = {r: GivingEngine(layout()) for r in range(3)}
    sync, senders, workers = local_driver(engines)
    senders.load(3)
    sync.sync(1)
    senders.load(4)

    def gone(method, *args):
        raise M3rlError("replica 0 is gone; restart it before calling it")

    monkeypatch.setattr(workers[0], "call", gone)
    sync.bring(2, 1)
    assert phases(sync, 2)[-len(TAKEN) :] == TAKEN
    assert_holds(engines[2].tensors, layout(), 3)


@pytest.mark.usefixtures("_store_without_sockets")
@pytest.mark.parametrize("why", ["older", "other layout", "poisoned"])
def test_without_a_peer_that_serves_the_version_and_holds_the_same_the_trainer_gives(why):
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines)
    senders.load(1)
    sync.sync(1, [0])
    senders.load(2)
    if why == "poisoned":
        engines[0].fault = flip_in("lm_head.weight")
        sync.sync(2, [0])
        assert sync.states()[0] == "POISONED"
    if why == "other layout":
        sync._replicas[0].layouts = ("another",)
    version = 1 if why == "other layout" else 2
    sync.bring(1, version)
    assert phases(sync, 1) == SYNCED
    assert_holds(engines[1].tensors, layout(), 2)
    assert sync.states()[1] == f"READY({version})"


@pytest.mark.usefixtures("_store_without_sockets")
def test_a_newcomer_takes_all_of_the_next_sync_where_others_take_a_delta():
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines, delta_full_every=9)
    trainer = senders.ranks[0].weights

    def step(version: int) -> list[int]:
        trainer[EMBEDDING][version, 2] += 1
        report = sync.sync(version)
        assert (report.ready, report.checksum_ok) == ((0, 1), True)
        for engine in engines.values():
            assert all(torch.equal(engine.tensors[name], trainer[name]) for name in trainer)
        return [number for number, one in sync._replicas.items() if one.record.is_delta]

    assert [step(1), step(2)] == [[], [0, 1]]
    sync.bring(1, 2, newcomer(engines, 1))
    assert phases(sync, 1)[-5:] == TAKEN
    assert [step(3), step(4)] == [[0], [0, 1]]


def flip_in(name: str):
    def fault(engine: FakeEngine, names: list[str]) -> None:
        if name in names:
            engine.loaded[name][1, 1] += 1

    return fault


@pytest.mark.usefixtures("_store_without_sockets")
@pytest.mark.parametrize("fault", ["a flipped bit", "another version serves"])
def test_a_hand_over_that_cannot_be_trusted_is_not_committed(monkeypatch, caplog, fault):
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines)
    senders.load(1)
    sync.sync(1)
    coming = newcomer(engines, 1)
    del sync.events[:]
    if fault == "a flipped bit":
        receive = hand_over._receive

        def damaged(pieces: list[Piece], hashes, *args):
            receive(pieces, hashes, *args)
            dict(pieces)[EXPERT.format(2)].view(torch.int16)[0, 0] ^= 1
            hashes._table.reset()
            hashes.launch()
            return hashes.read()

        monkeypatch.setattr(hand_over, "_receive", damaged)
    else:
        engines[0].version = 7  # behind the driver's back, from disk say
    sync.bring(1, 1, coming)
    assert sync.poisoned() == [], "the peer is as it was"
    assert sync.states()[0] == "READY(1)"
    assert ("worker 0 holds other bits than version 1 has in 1 te" in caplog.text) == (
        fault == "a flipped bit"
    )
    came_to = ["prepare", "stream"] if fault == "a flipped bit" else ["prepare"]
    assert phases(sync, 1) == [*came_to, *SYNCED]
    assert engines[1].events.count("commit") == 1
    assert_holds(engines[1].tensors, layout(), 1)
    assert sync.states()[1] == "READY(1)"


@pytest.mark.usefixtures("_store_without_sockets")
def test_no_sync_begins_amid_a_hand_over(monkeypatch):
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, workers = local_driver(engines)
    senders.load(1)
    sync.sync(1, [0])
    giving, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        giving.set()
        assert go_on.wait(10)

    workers[0].before["give"] = wait
    with ThreadPoolExecutor(1) as threads:
        bringing = threads.submit(sync.bring, 1, 1)
        assert giving.wait(10)
        with pytest.raises(BusyError, match=r"bring\(1\) to version 1"):
            sync.sync(2)
        go_on.set()
        bringing.result(10)
    assert sync.states() == {0: "READY(1)", 1: "READY(1)"}


@pytest.mark.usefixtures("_store_without_sockets")
def test_a_replica_that_nobody_can_bring_there_is_an_error():
    engines = {r: GivingEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines)
    senders.load(1)
    sync.sync(1)
    coming = newcomer(engines, 1)
    engines[1].fault = flip_in("lm_head.weight")
    engines[0].version = None
    with pytest.raises(SyncError, match="other bits than the trainer in 1 tensors"):
        sync.bring(1, 1, coming)
    assert sync.states()[1] == "POISONED"


class EngineWorker(LocalWorker):
    """Of a real engine, which a receiver reaches as in a replica."""

    def attach(self, receiver: Receiver) -> None:
        receiver.bind(EngineTarget(self.engine, lambda command: command()))
        self.receiver = receiver


WIDE = tiny_config(
    num_hidden_layers=2,
    dense_intermediate_size=64,
    intermediate_size=32,
    shared_intermediate_size=32,
    vocab_size=96,
)
"""Columns in whole blocks of MXFP8."""


@pytest.mark.usefixtures("_store_without_sockets")
@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("quantization", ["none", "mxfp8", "mxfp8_released"])
def test_what_an_engine_stores_is_handed_over_as_it_lies(monkeypatch, quantization, shadow):
    monkeypatch.setattr("tests.m3rl.weight_sync.test_sync_engine.RAW", WIDE)
    options = EngineConfig(
        dtype="bfloat16", num_pages=32, quantization=quantization, shadow_weights=shadow
    )
    engines = [Engine(model_config(WIDE), options) for _ in range(2)]
    rank = Rank(torch.bfloat16, 0, 1)
    sync = WeightSync(
        LocalSenders([rank]),
        {number: EngineWorker(engine) for number, engine in enumerate(engines)},
        pause=lambda number: engines[number].pause("keep"),
        resume=lambda number: engines[number].resume(),
        host="127.0.0.1",
        timeout_s=10.0,
        min_replicas=0,
        verify=True,
        chunk_bytes=5000,
    )
    sync.connect(0)
    rank.load(5)
    sync.sync(1, [0])
    rank.load(6)
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    assert engines[1].version == 1
    assert engines[1].weights_hash() == engines[0].weights_hash()
    truth = Engine(model_config(WIDE), options)
    truth.load_weights(random_tensors(WIDE, 5, torch.bfloat16).items(), 0)
    assert engines[1].weights_hash() == truth.weights_hash()


@pytest.mark.usefixtures("_store_without_sockets")
def test_a_peer_generates_while_it_gives_and_the_newcomer_then_generates_the_same(
    monkeypatch, tmp_path
):
    random_checkpoint(tmp_path, RAW, seed=0)
    replicas = [new_replica(tmp_path, shadow=False) for _ in range(2)]
    sync = WeightSync(
        LocalSenders([Rank(torch.float32, 0, 1)]),
        {number: ReplicaWorker(replica) for number, replica in enumerate(replicas)},
        pause=lambda number: replicas[number].pause("keep"),
        resume=lambda number: replicas[number].resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=0,
        verify=True,
    )
    sync.connect(0)
    sync.sync(1, [0])
    send, seen = hand_over._send, []

    def generating(*args: Any) -> dict[str, int]:
        seen.extend(replicas[0].generate([request(0), request(1)]))
        return send(*args)

    monkeypatch.setattr(hand_over, "_send", generating)
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    assert [result.version_spans.tolist() for result in seen] == [[[0, 1]]] * 2
    for result, again in zip(seen, replicas[1].generate([request(0), request(1)]), strict=True):
        assert again.version_spans.tolist() == [[0, 1]]
        assert again.token_ids.tolist() == result.token_ids.tolist()
        assert again.logprobs.tolist() == result.logprobs.tolist()


@pytest.mark.usefixtures("_store_without_sockets")
def test_a_replica_that_keeps_nothing_as_it_was_sent_is_not_asked():
    engines = {r: FakeEngine(layout()) for r in range(2)}
    sync, senders, _ = local_driver(engines)
    senders.load(3)
    sync.sync(1)
    sync.bring(1, 1)
    assert phases(sync, 1)[-len(SYNCED) :] == SYNCED
    assert "offer" not in [event.phase for event in sync.events]
    assert_holds(engines[1].tensors, layout(), 3)
