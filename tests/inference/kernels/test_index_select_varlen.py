from itertools import accumulate, pairwise

import pytest
import torch
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from inference.kernels.index_select_varlen import index_select_varlen, kernel, reference
from inference.kernels.packing import Packing

HEADS, DIM = 2, 8
BORDERS = [1, 3, 4, 5, 23, 4]


def index_case(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    index_q = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    return index_q, torch.randn(num_tokens, DIM, generator=generator)


def samples_of(lengths):
    return [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]


@pytest.mark.parametrize(("topk", "local"), [(1, 0), (3, 1), (4, 2), (9, 1)])
def test_each_sample_chooses_as_if_alone(topk, local):
    index_q, index_k = index_case(BORDERS)
    rule = {"block_size": 4, "topk_blocks": topk, "local_blocks": local}
    packed = index_select_varlen(index_q, index_k, Packing.of(BORDERS, "cpu"), **rule)
    for length, tokens in zip(BORDERS, samples_of(BORDERS), strict=True):
        alone = index_select_varlen(
            index_q[tokens], index_k[tokens], Packing.of([length], "cpu"), **rule
        )
        assert torch.equal(packed[tokens], alone)


def test_chooses_as_the_indexer_of_transformers():
    config = MiniMaxM3VLTextConfig(
        hidden_size=16,
        index_head_dim=DIM,
        index_n_heads=HEADS,
        index_block_size=4,
        index_topk_blocks=3,
        index_local_blocks=1,
    )
    torch.manual_seed(0)
    indexer = m3.MiniMaxM3VLIndexer(config, 0)
    lengths = [23, 1, 9]
    hidden = torch.randn(sum(lengths), 16)
    with torch.no_grad():
        index_q = indexer.q_norm(indexer.q_proj(hidden).view(-1, HEADS, DIM))
        index_k = indexer.k_norm(indexer.k_proj(hidden))
    found = index_select_varlen(
        index_q,
        index_k,
        Packing.of(lengths, "cpu"),
        block_size=4,
        topk_blocks=3,
        local_blocks=1,
    )
    for length, tokens in zip(lengths, samples_of(lengths), strict=True):
        rotation = (torch.ones(1, length, DIM), torch.zeros(1, length, DIM))
        with torch.no_grad():
            chosen = indexer(hidden[None, tokens], rotation, None, torch.arange(length)[None])
        wanted = chosen[0].transpose(0, 1)
        for query in range(length):
            for head in range(HEADS):
                ids = found[tokens][query, head].tolist()
                assert ids == sorted(ids, key=lambda block: (block < 0, block))
                kept = [block for block in ids if block >= 0]
                assert kept == sorted(b for b in wanted[query, head].tolist() if b >= 0)


@pytest.mark.parametrize(("first", "count"), [(0, 9), (7, 1), (9, 21), (13, 27)])
def test_a_range_of_queries_chooses_as_in_the_whole(first, count):
    index_q, index_k = index_case(BORDERS)
    rule = {"block_size": 4, "topk_blocks": 3, "local_blocks": 1}
    whole = index_select_varlen(index_q, index_k, Packing.of(BORDERS, "cpu"), **rule)
    queries = slice(first, first + count)
    part = Packing.of(BORDERS, "cpu", first, count)
    assert torch.equal(index_select_varlen(index_q[queries], index_k, part, **rule), whole[queries])


@pytest.mark.parametrize(("first", "count"), [(0, None), (10, 22)])
def test_the_kernels_choose_as_the_reference(kernel_device, first, count):
    packing = Packing.of(BORDERS, kernel_device, first, count)
    index_q, index_k = (x.to(kernel_device) for x in index_case(BORDERS, seed=3))
    index_q = index_q[first : first + packing.num_queries]
    found = kernel.index_select_varlen(index_q, index_k, packing, 4, 3, 1)
    assert torch.equal(found, reference.index_select_varlen(index_q, index_k, packing, 4, 3, 1))


def test_bad_input():
    index_q, index_k = index_case([5])
    packing = Packing.of([5], "cpu")
    rule = {"block_size": 4, "topk_blocks": 2}
    with pytest.raises(ValueError, match="must lie between 0 and topk_blocks=2"):
        index_select_varlen(index_q, index_k, packing, local_blocks=3, **rule)
    with pytest.raises(ValueError, match="index_k_TD has shape"):
        index_select_varlen(index_q, index_k[:4], packing, local_blocks=1, **rule)
    with pytest.raises(TypeError, match="index_k_TD is float64"):
        index_select_varlen(index_q, index_k.double(), packing, local_blocks=1, **rule)
