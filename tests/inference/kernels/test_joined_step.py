"""A step in which requests join a prompt that a chunk of the same step writes, on the GPU."""

import numpy as np
import pytest
import torch

from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.paged_attention import paged_attention, reference
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write
from inference.layers.rope import rope_table

PAGE, D, H, K, SHARED = 128, 128, 64, 4, 5
LENGTH = SHARED * PAGE + 1


def joined_step(device: torch.device) -> PagedBatch:
    """Two requests with one token each, then the chunk that writes the pages they share."""
    num_new = np.array([1, 1, LENGTH])
    row_T = torch.tensor(np.repeat(np.arange(3), num_new))
    positions_T = torch.cat([torch.tensor([LENGTH - 1] * 2), torch.arange(LENGTH)])
    table_RN = torch.tensor([[0, 1, 2, 3, 4, own] for own in (5, 6, 7)], dtype=torch.int32)
    slots_T = table_RN[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE
    units = plan_units(np.array([6, 6]), np.array([0, 2]), np.array([SHARED]), 4).to(device)
    return PagedBatch(
        positions_T=positions_T.to(device),
        slots_T=slots_T.long().to(device),
        query_start_R1=torch.tensor([0, 1, 2, 2 + LENGTH], dtype=torch.int32, device=device),
        seq_len_R=torch.full((3,), LENGTH, dtype=torch.int32, device=device),
        page_table_RN=table_RN.to(device),
        page_size=PAGE,
        num_decodes=2,
        max_query_len=LENGTH,
        max_seq_len=LENGTH,
        plan=DecodePlan(index=units, dense=units),
        query_len_host_R=num_new,
        seq_len_host_R=np.full(3, LENGTH, np.int32),
    )


@pytest.mark.gpu
def test_pages_that_a_chunk_of_the_step_writes_are_read_after_it(cuda):
    """Fresh pages hold NaN: who reads one before its keys are there passes the NaN on."""
    batch = joined_step(cuda)
    assert batch.plan is not None
    assert batch.plan.dense.shared_X4[:, 3].sum() == SHARED
    generator = torch.Generator(device=cuda).manual_seed(0)
    width = (H + 2 * K) * D
    qkv_TX = torch.randn(2 + LENGTH, width, generator=generator, device=cuda).bfloat16()
    norms = QKNorms(*(torch.zeros(D, dtype=torch.bfloat16, device=cuda) for _ in "qk"), None, None)
    rope_SX = rope_table(64, 5e6, LENGTH, cuda)
    shape = (8, K, PAGE, D)
    for _ in range(20):
        k, v = (torch.full(shape, torch.nan, device=cuda, dtype=torch.bfloat16) for _ in "kv")
        pages = LayerPages(k, v, None)
        q_THD, _ = qk_norm_rope_write(
            qkv_TX, norms, rope_SX, batch, pages, num_heads=H, num_kv_heads=K, head_dim=D, eps=1e-6
        )
        out_THD = paged_attention(q_THD, pages, batch, scale=D**-0.5)
        wanted_THD = reference.paged_attention(q_THD, pages, batch, D**-0.5)
        torch.testing.assert_close(out_THD[:2], wanted_THD[:2], rtol=2e-2, atol=2e-2)
