"""What a delta's messages hold, and which rounds travel together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m3rl.weight_sync.delta import ITEMS, Changes, DeltaMessage, op_bytes
from m3rl.weight_sync.plan import CopyOp, Plan, make_plan, ops_digest
from m3rl.weight_sync.relay import relayed
from tests.m3rl.weight_sync.sync_fakes import layout

counts = st.fixed_dictionaries({item: st.integers(0, 9) for item in ITEMS})


@given(counts, counts)
def test_the_sections_of_a_message_are_all_of_it_and_aligned(tiles, entries):
    message = DeltaMessage(0, [0], tiles, entries)
    wire = torch.zeros(message.nbytes, dtype=torch.uint8)
    for item, (of_tiles, places, values) in message.sections(wire).items():
        assert (of_tiles.numel(), places.numel(), values.numel()) == (
            tiles[item],
            entries[item],
            entries[item],
        )
        assert values.element_size() == item
        for section in (of_tiles, places, values):
            assert (section.data_ptr() - wire.data_ptr()) % section.element_size() == 0
            section += 1
    assert message.nbytes == sum(4 * tiles[i] + (2 + i) * entries[i] for i in ITEMS)
    for item, sections in message.sections(wire).items():
        assert all(bool((section == 1).all()) for section in sections), f"{item}: not overlapped"


def test_bytes_of_an_op_worked_out_by_hand():
    """[3, 65536] BF16: three tiles, 5 changed: 12 + 5 * 4. In MXFP8: three tiles of values and one
    of scales, 5 and 2 changed: 16 + 7 * 3. FP32 of [7]: a tile, 1 changed: 4 + 6."""
    ops = [
        CopyOp("pre", "a", "bfloat16", ((0, 3), (0, 65536)), 0, 0),
        CopyOp("pre", "b", "bfloat16", ((0, 3), (0, 65536)), 0, 0, storage="mxfp8"),
        CopyOp("pre", "c", "float32", ((1, 8),), 0, 0),
    ]
    assert op_bytes(ops, np.array([[5, 0], [5, 2], [1, 0]])).tolist() == [32, 37, 10]


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 0]])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 100, 1 << 20])
def test_both_ends_of_every_pair_expect_the_same_messages(chunk_bytes, nodes):
    """Workers that hold the same, on nodes of their own or on one, where they pass on."""
    plan = relayed(make_plan([layout(r, 3) for r in range(3)], [layout()] * 3, 64), nodes)
    assert any(op.via >= 0 for op in plan.ops) == (nodes == [0, 0, 0])
    generator = np.random.default_rng(4)
    changed_of = {(op.name, op.bounds): generator.integers(0, 5) for op in plan.ops}
    by_sender = [
        np.array([[changed_of[op.name, op.bounds], 0] for op in plan.sends(r)]) for r in range(3)
    ]
    changes = Changes(plan, 7, by_sender, chunk_bytes)
    senders, workers = changes.deltas()
    sent = {(n, r, m.peer): m for r, delta in senders.items() for n, g in delta.groups for m in g}
    received = {}
    for w, delta in workers.items():
        ops = plan.receives(w)
        assert sorted(i for _, g in delta.groups for m in g for i in m.ops) == [*range(len(ops))]
        for number, group in delta.groups:
            received |= {(number, m.peer, w): m for m in group}
            rounds = {ops[i].round for m in group for i in m.ops}
            assert sum(m.nbytes for m in group) <= chunk_bytes or len(rounds) == 1
    assert sent.keys() == received.keys()
    for (number, r, w), message in sent.items():
        other = received[number, r, w]
        assert (message.tiles, message.entries) == (other.tiles, other.entries)
        here, there = [plan.sends(r)[i] for i in message.ops], plan.receives(w)
        assert [(op.name, op.bounds) for op in here] == [
            (there[i].name, there[i].bounds) for i in other.ops
        ]
        assert sum(changed_of[op.name, op.bounds] for op in here) == sum(message.entries.values())
    assert changes.nbytes == sum(delta.nbytes for delta in senders.values())
    assert (chunk_bytes == 1 << 20) == ({n for n, _, _ in sent} == {0})


@pytest.mark.parametrize(("count", "pays"), [(0, True), (8190, True), (8191, False)])
def test_a_delta_pays_below_a_quarter_of_all_bytes(count, pays):
    """65,536 BF16 are 131,072 bytes; the tile takes 4 of 32,768, each change 4."""
    op = CopyOp("pre", "a", "bfloat16", ((0, 65536),), 0, 0)
    plan = Plan((op,), ops_digest((op,)))
    assert Changes(plan, 0, [np.array([[count, 0]])], 1 << 20).pays == pays
