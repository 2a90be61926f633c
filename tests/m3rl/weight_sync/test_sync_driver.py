from __future__ import annotations

import torch
from sync_fakes import FakeEngine, assert_holds, layout, local_sync


def test_weights_a_then_b_then_a_arrive_bit_for_bit():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    hashes = []
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        report = sync.sync(version)
        assert_holds(engine.tensors, layout(), seed)
        assert engine.version == version
        assert sync.states() == {0: f"READY({version})"}
        hashes.append(report.wire_hash)
    assert hashes[0] == hashes[2] != hashes[1]
