from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from inference.kernels.tensor_hash import HashTable, tensor_hash
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError, RefusedError, SyncError, VerificationError
from m3rl.weight_sync.layout import as_slots, layout_digest, whole
from m3rl.weight_sync.plan import check_sends, make_plan, ops_digest
from m3rl.weight_sync.prepare import Agreed, Prepare, agreed_ops
from m3rl.weight_sync.receive import EngineReceiver, ReceiverState
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.verify import HashSums, OpHash, hash_parts
from tests.m3rl.weight_sync.sync_fakes import (
    BIAS,
    TENSORS,
    FakeEngine,
    cut,
    layout,
    rows,
    weights,
    wire_hash_of,
)


def test_a_receiver_travels_by_pickle_and_binds_to_an_engine_there():
    receiver = pickle.loads(pickle.dumps(EngineReceiver(2, 1)))
    assert receiver.state is ReceiverState.EMPTY
    receiver.bind(FakeEngine(layout(1, 2)))
    assert receiver.layout() == tuple(layout(1, 2))


def test_an_engine_that_cannot_be_synced_is_refused_with_what_it_lacks():
    class Half:
        def begin_load(self, version: int) -> None: ...
        def write(self, name, bounds, tensor) -> None: ...

    with pytest.raises(TypeError, match=r"Half cannot be synced: it has no .*'plan_load'"):
        EngineReceiver(0).bind(Half())  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="replica 0 worker 0 holds no tensor"):
        EngineReceiver(0).bind(FakeEngine([]))


def test_calls_out_of_order_are_refused():
    receiver = EngineReceiver(0)
    receiver.bind(FakeEngine(layout()))
    with pytest.raises(RefusedError, match="not connected"):
        receiver.prepare(Prepare(1, 1, "", "", None, True))
    for call in (receiver.stream, lambda: receiver.commit({}), lambda: receiver.arrange((), ())):
        with pytest.raises(SyncError, match=r"replica 0 worker 0 is EMPTY, not .*begins a sync"):
            call()
    receiver.close()


def test_an_engines_own_description_becomes_slots():
    class Slot:
        name, dtype, bucket = "w", torch.bfloat16, "pre"
        shape, bounds = torch.Size([4, 2]), [[0, 4], [0, 2]]

    assert as_slots([Slot()]) == (TensorSlot("w", "bfloat16", (4, 2), ((0, 4), (0, 2)), "pre"),)


def test_a_rank_goes_on_with_the_ops_it_was_told_before():
    held = layout()
    ops = make_plan([held], [held], 1 << 20).ops
    digests = {"layout_digest": layout_digest(held), "ops_digest": ops_digest(ops)}
    first = Prepare(1, 1, ops=ops, verify=True, **digests)
    later = Prepare(2, 2, ops=None, verify=True, **digests)
    known = agreed_ops(first, held, None, "trainer rank 0", check_sends)
    assert known == Agreed(held, layout_digest(held), ops, ops_digest(ops), 2 * 306 + 4 * 28)
    assert agreed_ops(later, layout(), known, "trainer rank 0", check_sends) is known
    with pytest.raises(RefusedError, match="version 2: it was never told its ops"):
        agreed_ops(later, held, None, "trainer rank 0", check_sends)
    with pytest.raises(RefusedError, match="are not those of the driver's plan"):
        agreed_ops(
            dataclasses.replace(later, ops_digest=ops_digest(ops[1:])),
            held,
            known,
            "trainer rank 0",
            check_sends,
        )
    with pytest.raises(RefusedError, match="are not those the driver planned for"):
        agreed_ops(later, held[1:], known, "trainer rank 0", check_sends)
    missing = Prepare(1, 1, layout_digest(held[1:]), ops_digest(ops), ops, True)
    with pytest.raises(RefusedError, match=r"version 1: trainer rank 0 is to send .*embed_tokens"):
        agreed_ops(missing, held[1:], None, "trainer rank 0", check_sends)


def test_a_sender_says_when_it_is_asked_out_of_order():
    sender = Sender(0, layout(), lambda name, bounds: cut(weights(0)[name], bounds))
    with pytest.raises(RefusedError, match=r"not connected to replica 1; connect\(1\) first"):
        sender.sync_stream(1)
    assert sender.sync_close(1) is None
    with pytest.raises(LayoutError, match="trainer rank 0 holds no tensor"):
        Sender(0, [], lambda name, bounds: torch.zeros(0))


def hashes_of(plan, sender: int, truth: dict[str, torch.Tensor]) -> np.ndarray:
    parts = [
        part
        for op in plan.sends(sender)
        for part in hash_parts(op, cut(truth[op.name], op.bounds), TENSORS[op.name][1])
    ]
    table = HashTable(parts)
    table.launch(0, len(parts))
    return np.array([OpHash(value, value) for value in table.read()], np.uint64)


@pytest.mark.parametrize(("num_senders", "num_workers"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_expected_hashes_are_those_of_the_tensors_however_both_sides_are_cut(
    num_senders: int, num_workers: int
):
    truth = weights(8)
    plan = make_plan(
        [layout(r, num_senders) for r in range(num_senders)],
        [layout(w, num_workers) for w in range(num_workers)],
        100,
    )
    by_sender = [hashes_of(plan, r, truth) for r in range(num_senders)]
    sums = HashSums(plan, num_workers)
    expected = sums.expected(by_sender)
    assert expected.wire == wire_hash_of(truth, plan.ops)
    for w, each in enumerate(expected.by_worker):
        by_name = dict(zip(sums.names[w], np.frombuffer(each, np.uint64).tolist(), strict=True))
        for name, (_, shape, _) in TENSORS.items():
            bounds = rows(shape, w, num_workers)
            part = cut(truth[name], bounds)
            offsets = tuple(start for start, _ in bounds)
            op = next(op for op in plan.ops if op.name == name)
            unit = math.gcd(op.grain, 16 // part.element_size())
            found = tensor_hash(part, name=name, offsets=offsets, shape=shape, unit=unit)
            assert by_name[name] == found


def test_two_ranks_with_other_bits_of_one_part_are_found_among_the_hashes():
    plan = make_plan([layout(), layout()], [layout(), layout()], 1 << 20)
    by_sender = [hashes_of(plan, r, weights(0)) for r in range(2)]
    assert plan.sends(0)[0].bounds == plan.sends(1)[0].bounds == whole((11, 6))
    by_sender[1][0, 0] ^= np.uint64(1)
    with pytest.raises(VerificationError, match="trainer ranks 0 and 1 hold different bits of mod"):
        HashSums(plan, 2).expected(by_sender)
    assert any(op.name == BIAS for op in plan.ops)
