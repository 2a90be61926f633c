"""The grouped products at prefill sizes on Hopper: one warp fetches, two warpgroups multiply.

Written in Gluon, since a tile's weights must come in while the tile before is still being written.
A tile is 128 sorted rows times 256 rows of weights; each warpgroup has 64 of the rows, and the
second one rests where a tile has no more than 64: an expert's last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inference.kernels.expert_gemm.align_kernel import Plan

ROWS = 128
HALF = gl.constexpr(64)
COLS = gl.constexpr(256)
DEPTH = gl.constexpr(64)
STAGES = gl.constexpr(4)
NUM_WARPS = 4
"""Of the first warpgroup; the second and the fetching warp come on top."""

# Renamed between Triton 3.6 and 3.9.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def can_run(x_TC: Tensor, w13_E2IC: Tensor) -> bool:
    """Whether these kernels serve the shapes: BF16 or FP16, whole tiles of columns, Hopper."""
    width, hidden = w13_E2IC.shape[1] // 2, w13_E2IC.shape[2]
    return (
        x_TC.is_cuda
        and x_TC.dtype in (torch.bfloat16, torch.float16)
        and width % 128 == 0
        and hidden % COLS.value == 0
        and torch.cuda.get_device_capability(x_TC.device)[0] == 9
    )


@triton.jit(do_not_specialize=["order_start"])
def _gather_kernel(
    x_ptr,
    plan_ptr,
    out_ptr,
    order_start,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[row] = x[token of the sorted row]."""
    i_row = tl.program_id(0).to(tl.int64)
    if i_row < tl.load(plan_ptr + 1):
        token = (tl.load(plan_ptr + order_start + i_row) // TOPK).to(tl.int64)
        for first in range(0, HIDDEN, BLOCK_C):
            o_c = first + tl.arange(0, BLOCK_C)
            b_x = tl.load(x_ptr + token * HIDDEN + o_c, mask=o_c < HIDDEN)
            tl.store(out_ptr + i_row * HIDDEN + o_c, b_x, mask=o_c < HIDDEN)


@gluon.jit
def _tile_of(plan_ptr, tile, num_m, num_n: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, first row behind, tile of columns)."""
    per_group = GROUP * num_n
    first_m = tile // per_group * GROUP
    size = gl.minimum(num_m - first_m, GROUP)
    p_tile = plan_ptr + 4 + 4 * (first_m + tile % per_group % size)
    i_n = tile % per_group // size
    return gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_tile + 2), i_n


@gluon.jit
def _fetch(
    a_desc,
    w_desc,
    plan_ptr,
    a_smem,
    w_smem,
    full,
    empty,
    K: gl.constexpr,
    N: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The producer: rows and weights of every tile of this program, STAGES steps ahead."""
    num_m = gl.load(plan_ptr)
    cols: gl.constexpr = COLS // 2 if GATED else COLS
    num_n: gl.constexpr = N // cols
    w_bytes: gl.constexpr = COLS * DEPTH * 2
    a_bytes: gl.constexpr = HALF * DEPTH * 2
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        expert, first, end, i_n = _tile_of(plan_ptr, tile, num_m, num_n, GROUP)
        is_big = end - first > HALF
        row = expert * (2 * N if GATED else N) + i_n * cols
        for i_k in range(0, K, DEPTH):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, w_bytes + 2 * a_bytes, pred=is_big)
            mbarrier.expect(bar, w_bytes + a_bytes, pred=end - first <= HALF)
            _load(a_desc, [first, i_k], bar, a_smem.index(2 * slot))
            _load(a_desc, [first + HALF, i_k], bar, a_smem.index(2 * slot + 1), pred=is_big)
            if GATED:
                _load(w_desc, [row, i_k], bar, w_smem.index(2 * slot))
                _load(w_desc, [row + N, i_k], bar, w_smem.index(2 * slot + 1))
            else:
                _load(w_desc, [row, i_k], bar, w_smem.index(slot))
            step += 1


@gluon.jit
def _gate_up(
    plan_ptr,
    h_ptr,
    a_smem,
    w_smem,
    full,
    empty,
    alpha,
    limit,
    beta,
    PART: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A warpgroup's 64 rows of h = swiglu_oai(gate, up)."""
    cols: gl.constexpr = COLS // 2
    num_n: gl.constexpr = N // cols
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    num_m = gl.load(plan_ptr)
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        _, first, end, i_n = _tile_of(plan_ptr, tile, num_m, num_n, GROUP)
        if end - first > PART * HALF:
            b_gate = gl.zeros([HALF, cols], gl.float32, layout=ACC)
            b_up = gl.zeros([HALF, cols], gl.float32, layout=ACC)
            for i_k in range(0, K, DEPTH):
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                a = a_smem.index(2 * slot + PART)
                w1 = w_smem.index(2 * slot).permute((1, 0))
                w3 = w_smem.index(2 * slot + 1).permute((1, 0))
                f_gate = warpgroup_mma(a, w1, b_gate, is_async=True)
                f_up = warpgroup_mma(a, w3, b_up, is_async=True)
                b_gate, b_up = warpgroup_mma_wait(2, deps=[f_gate, f_up])
                _barrier()
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i_k > 0)
                step += 1
            b_gate, b_up = warpgroup_mma_wait(0, deps=[b_gate, b_up])
            _barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            b_gate = gl.minimum(b_gate, limit)
            b_up = gl.minimum(gl.maximum(b_up, -limit), limit)
            b_h = b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)
            b_h = gl.convert_layout(b_h.to(h_ptr.dtype.element_ty), OUT)
            o_m = first + PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
            o_n = i_n * cols + gl.arange(0, cols, layout=gl.SliceLayout(0, OUT))
            p_h = h_ptr + o_m.to(gl.int64)[:, None] * N + o_n[None, :]
            gl.store(p_h, b_h, mask=(o_m < end)[:, None])
        else:
            for _ in range(0, K, DEPTH):
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(slot))
                step += 1


@gluon.jit
def _down(
    plan_ptr,
    y_ptr,
    weights_ptr,
    order_start,
    a_smem,
    w_smem,
    full,
    empty,
    PART: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A warpgroup's 64 rows of y[pair] = weight · w2 h."""
    num_n: gl.constexpr = N // COLS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_m = gl.load(plan_ptr)
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        _, first, end, i_n = _tile_of(plan_ptr, tile, num_m, num_n, GROUP)
        if end - first > PART * HALF:
            b_y = gl.zeros([HALF, COLS], gl.float32, layout=ACC)
            for i_k in range(0, K, DEPTH):
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                w = w_smem.index(slot).permute((1, 0))
                f_y = warpgroup_mma(a_smem.index(2 * slot + PART), w, b_y, is_async=True)
                b_y = warpgroup_mma_wait(1, deps=[f_y])
                _barrier()
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i_k > 0)
                step += 1
            b_y = warpgroup_mma_wait(0, deps=[b_y])
            _barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            o_m = first + PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ACC))
            m_m = o_m < end
            b_pair = gl.load(plan_ptr + order_start + o_m, mask=m_m, other=0)
            b_y *= gl.load(weights_ptr + b_pair, mask=m_m, other=0.0)[:, None]
            o_n = i_n * COLS + gl.arange(0, COLS, layout=gl.SliceLayout(0, ACC))
            p_y = y_ptr + b_pair.to(gl.int64)[:, None] * N + o_n[None, :]
            gl.store(p_y, b_y, mask=m_m[:, None])
        else:
            for _ in range(0, K, DEPTH):
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(slot))
                step += 1


@gluon.jit
def _barriers():
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return full, empty


@gluon.jit
def gate_up_hopper_kernel(
    x_desc,
    w_desc,
    plan_ptr,
    h_ptr,
    alpha,
    limit,
    beta,
    K: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF, DEPTH], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, COLS // 2, DEPTH], w_desc.layout)
    full, empty = _barriers()
    # fmt: off
    gl.warp_specialize(
        [
            (_gate_up, (plan_ptr, h_ptr, a_smem, w_smem, full, empty, alpha, limit, beta,
                        gl.constexpr(0), K, N, GROUP)),
            (_gate_up, (plan_ptr, h_ptr, a_smem, w_smem, full, empty, alpha, limit, beta,
                        gl.constexpr(1), K, N, GROUP)),
            (_fetch, (x_desc, w_desc, plan_ptr, a_smem, w_smem, full, empty,
                      K, N, gl.constexpr(True), GROUP)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on


@gluon.jit(do_not_specialize=["order_start"])
def down_hopper_kernel(
    h_desc,
    w_desc,
    plan_ptr,
    y_ptr,
    weights_ptr,
    order_start,
    K: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(h_desc.dtype, [2 * STAGES, HALF, DEPTH], h_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, COLS, DEPTH], w_desc.layout)
    full, empty = _barriers()
    # fmt: off
    gl.warp_specialize(
        [
            (_down, (plan_ptr, y_ptr, weights_ptr, order_start, a_smem, w_smem, full, empty,
                     gl.constexpr(0), K, N, GROUP)),
            (_down, (plan_ptr, y_ptr, weights_ptr, order_start, a_smem, w_smem, full, empty,
                     gl.constexpr(1), K, N, GROUP)),
            (_fetch, (h_desc, w_desc, plan_ptr, a_smem, w_smem, full, empty,
                      K, N, gl.constexpr(False), GROUP)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on


def _descriptor(rows: Tensor, num_rows: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    block = [num_rows, DEPTH.value]
    return TensorDescriptor.from_tensor(
        rows, block, gl.NVMMASharedLayout.get_default_for(block, dtype)
    )


def gate_up(
    x_TC: Tensor,
    w13_E2IC: Tensor,
    plan: Plan,
    topk: int,
    alpha: float,
    limit: float,
    beta: float,
    *,
    num_programs: int,
    group: int = 8,
) -> Tensor:
    """As `kernel.gate_up`; the tokens are put into the plan's order first."""
    hidden, width, num_pairs = x_TC.shape[1], w13_E2IC.shape[1] // 2, x_TC.shape[0] * topk
    x_XC = torch.empty(num_pairs, hidden, dtype=x_TC.dtype, device=x_TC.device)
    h_XI = torch.empty(num_pairs, width, dtype=x_TC.dtype, device=x_TC.device)
    _gather_kernel[(num_pairs,)](
        x_TC, plan.data, x_XC, plan.order_start, HIDDEN=hidden, TOPK=topk, BLOCK_C=2048
    )
    gate_up_hopper_kernel[(num_programs,)](
        _descriptor(x_XC, HALF.value),
        _descriptor(w13_E2IC.view(-1, hidden), COLS.value // 2),
        plan.data,
        h_XI,
        alpha,
        limit,
        beta,
        K=hidden,
        N=width,
        GROUP=group,
        num_warps=NUM_WARPS,
    )
    return h_XI


def down(
    h_XI: Tensor,
    w2_ECI: Tensor,
    weights_TA: Tensor,
    plan: Plan,
    *,
    num_programs: int,
    group: int = 8,
) -> Tensor:
    """As `kernel.down`."""
    _, hidden, width = w2_ECI.shape
    y_XC = torch.empty(h_XI.shape[0], hidden, dtype=torch.float32, device=h_XI.device)
    down_hopper_kernel[(num_programs,)](
        _descriptor(h_XI, HALF.value),
        _descriptor(w2_ECI.view(-1, width), COLS.value),
        plan.data,
        y_XC,
        weights_TA,
        plan.order_start,
        K=width,
        N=hidden,
        GROUP=group,
        num_warps=NUM_WARPS,
    )
    return y_XC
