"""Routed experts and selected blocks that come out are the choices that were really made."""

import numpy as np
import pytest
import torch

from inference.engine import Request
from tests.inference.engine.engines import (
    greedy,
    make_engine,
    oracle,
    prompt,
    run,
    sampled,
    step_to_end,
)

CAPTURE = {"capture_routing": True, "capture_blocks": True}
BOTH = {"routing": True, "blocks": True}


def oracle_choices(token_ids):
    """transformers' (experts [S, 3, A] sorted, blocks [S, 3, K, topk]) for one sequence."""
    experts, blocks, hooks = [], [], []
    for layer in oracle().model.layers[1:]:
        hooks.append(layer.mlp.gate.register_forward_hook(lambda *args: experts.append(args[2][2])))
        hooks.append(
            layer.self_attn.indexer.register_forward_hook(
                lambda *args: blocks.append(args[2][0].transpose(0, 1))
            )
        )
    with torch.no_grad():
        oracle()(torch.tensor(token_ids[None].astype(np.int64)))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(experts, 1).numpy(), -1), torch.stack(blocks, 1).numpy()


def assert_right(output):
    """Every token but the last sampled one had a forward pass, and its row is transformers'."""
    computed = np.concatenate([output.prompt_ids, output.token_ids])[:-1]
    experts, blocks = oracle_choices(computed)
    assert output.routing.dtype == np.uint8
    assert output.blocks.dtype == np.int32
    assert np.sort(output.routing, -1).tolist() == experts.tolist()
    # Ours ascend and end with -1; the order inside transformers' is by score.
    ours = np.sort(output.blocks, -1)
    assert ours.tolist() == np.sort(blocks, -1).tolist()


@pytest.mark.parametrize("budget", [5, 100])
def test_choices_are_those_of_transformers(budget):
    engine = make_engine(max_tokens_per_step=budget, **CAPTURE)
    requests = [Request(f"r{n}", prompt(n, seed=n), sampled(9, seed=n, **BOTH)) for n in (1, 7, 21)]
    for output in run(engine, requests):
        assert_right(output)


def test_blocks_ascend_and_hold_the_own_block_and_no_later_one():
    engine = make_engine(**CAPTURE)
    (output,) = run(engine, [Request("r", prompt(21), greedy(5, **BOTH))])
    for position, layers in enumerate(output.blocks):
        for heads in layers:
            for chosen in heads:
                real = chosen[chosen >= 0].tolist()
                assert real == sorted(set(real))
                assert max(real) == position // 4
                assert len(real) == min(2, position // 4 + 1)


def test_shared_pages_carry_their_rows():
    engine = make_engine(**CAPTURE)
    run(engine, [Request("warm", prompt(13), greedy(1))])
    requests = [Request(f"r{i}", prompt(17), sampled(4, seed=i, **BOTH), "g") for i in range(3)]
    outputs = run(engine, requests)
    assert [output.num_cached_tokens for output in outputs] == [12, 16, 16]
    for output in outputs:
        assert_right(output)


def test_preempted_requests_have_the_rows_of_their_recomputed_keys():
    engine = make_engine(num_pages=14, enable_prefix_cache=False, **CAPTURE)
    requests = [Request(f"r{i}", prompt(5, seed=i), sampled(25, seed=i, **BOTH)) for i in range(4)]
    outputs = run(engine, requests)
    assert engine.stats()["preemptions"] >= 2
    for output in outputs:
        assert_right(output)


def test_an_aborted_request_has_the_rows_of_what_was_computed():
    engine = make_engine(max_tokens_per_step=8, **CAPTURE)
    engine.add(Request("prefill", prompt(20), greedy(5, **BOTH)))
    engine.add(Request("waiting", prompt(5), greedy(5, **BOTH)))
    engine.step()
    engine.abort()
    outputs = {output.request_id: output for output in engine.step()}
    experts, _ = oracle_choices(np.array(prompt(20))[:8])
    assert np.sort(outputs["prefill"].routing, -1).tolist() == experts.tolist()
    assert outputs["waiting"].routing is None


def test_each_stream_is_returned_only_when_asked():
    engine = make_engine(capture_routing=True)
    engine.add(Request("asks", prompt(5), greedy(2, routing=True)))
    engine.add(Request("does-not", prompt(5), greedy(2)))
    outputs = step_to_end(engine)
    assert outputs["asks"].routing.shape == (6, 3, 2)
    assert outputs["asks"].blocks is None
    assert outputs["does-not"].routing is None
