"""Routed experts as two grouped products and a sum: a few tokens, or tiles of a plan.

The weights of the experts that were hit are read once: at decode sizes that is the whole cost.
Launch grids follow from shapes alone, so a call can be captured in a CUDA graph; how many tiles
there are is found on the device. Up to MAX_FEW_TOKENS the tiles come from the ids themselves and
the shared expert is one expert more; above, `align_kernel` sorts the pairs into a plan first, and
the shared expert is a dense MLP whose output, rounded to the tokens' dtype, is added in the sum.

Programmatic dependent launch: `decode_down_kernel` and `combine_kernel` read the ids before they
wait. That is safe because the first product waits before it lets anything behind it start.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inference.kernels.expert_gemm.align_kernel import Plan, align
from inference.kernels.expert_gemm.decode_kernel import (
    combine_kernel,
    decode_down_kernel,
    decode_gate_up_kernel,
)
from inference.kernels.expert_gemm.gemm_kernel import down_kernel, gate_up_kernel
from inference.kernels.hardware import USE_PDL, num_multiprocessors
from inference.kernels.linear import SwiGLU, linear

MAX_FEW_TOKENS = 32
MAX_FEW_PAIRS = 128
"""Every program compares them all with each other."""
FEW_WARPS = 4
FEW_PREFETCH = 256
"""Elements of each row that `Few` fetches before the wait for the kernel in front."""
MANY_ROWS = 512
"""Rows of an expert from which a tile of its own for the last few costs less than longer tiles."""


@dataclass(frozen=True, slots=True)
class Few:
    """How both products of a few tokens are cut: `rows` of weights a tile."""

    rows: int = 64
    depth: int = 128
    stages: int = 5
    programs: int = 2
    """Persistent programs a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product of a plan is cut: `cols` of the output (gates, for the first) a tile."""

    cols: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    """Persistent programs a multiprocessor."""
    group: int = 1
    """Tiles of rows that go over the same columns at the same time."""
    swap: bool = False
    tma: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    """`rows` a tile and `tail` more in a last one, shared by both products as the plan is."""

    rows: int
    gate_up: Tiles
    down: Tiles
    tail: int = 0


def few_for(num_tokens: int, dtype: torch.dtype) -> Few:
    if dtype.itemsize > 2:
        return Few(depth=32, stages=2, programs=1)
    if num_tokens > 16:
        return Few(stages=4)
    # A single token has hardly more tiles than programs: a program each spreads them better.
    return Few(programs=4) if num_tokens == 1 else Few()


def config_for(
    num_pairs: int, num_experts: int, dtype: torch.dtype, num_routed: int | None = None
) -> Config:
    """By the rows an expert would get on average if all pairs were this rank's.

    Only what a long tile does with the last few rows goes by what it does get.
    """
    if dtype.itemsize > 2:
        tiles = Tiles(cols=32, depth=32, warps=4, stages=2, programs=2, tma=False)
        return Config(16, tiles, tiles)
    rows = num_pairs / num_experts
    if rows > 48:
        has_tail = num_pairs / (num_routed or num_experts) < MANY_ROWS
        many = Tiles(cols=128, depth=64, warps=8, stages=4, group=4 if has_tail else 8)
        return Config(128, many, replace(many, cols=256), tail=32 if has_tail else 0)
    if rows > 10:
        few = Tiles(cols=64, depth=128, warps=4, stages=4, group=2, swap=True)
        down = replace(few, cols=128)
        if rows > 22:
            return Config(64, few, replace(down, depth=64, programs=2, swap=False))
        return Config(32, few, down)
    few = Tiles(cols=64, depth=128, warps=4, stages=3, programs=2, group=2, swap=True)
    return Config(16, few, few)


def expert_gemm(
    x_TC: Tensor,
    w13_E2IC: Tensor,
    w2_ECI: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    shared: tuple[Tensor, Tensor] | None = None,
    num_routed: int | None = None,
    *,
    few: Few | None = None,
    config: Config | None = None,
    use_pdl: bool = USE_PDL,
) -> Tensor:
    """`few` or `config` choose the way and how it is cut."""
    (num_tokens, topk), num_experts = ids_TA.shape, w13_E2IC.shape[0]
    x, ids, weights, w13, w2 = (
        tensor.contiguous() for tensor in (x_TC, ids_TA, weights_TA, w13_E2IC, w2_ECI)
    )
    if not num_tokens:
        return torch.empty_like(x)
    act = alpha, limit, beta
    is_few = num_tokens <= MAX_FEW_TOKENS and num_tokens * topk <= MAX_FEW_PAIRS
    if few is not None or (config is None and is_few):
        few = few or few_for(num_tokens, x.dtype)
        is_like = shared is not None and shared[0].shape == w13.shape[1:]
        own = shared if is_like else None
        y_XC = few_products(x, w13, w2, ids, weights, own, *act, few, use_pdl=use_pdl)
        add_TC = y_XC[num_tokens * topk :] if is_like else shared_mlp(x, shared, *act)
        return combine(y_XC, ids, add_TC, x.dtype, use_pdl=use_pdl)
    add_TC = shared_mlp(x, shared, *act)
    config = config or config_for(ids.numel(), num_experts, w13.dtype, num_routed)
    plan = align(ids, num_experts, config.rows, config.tail, use_pdl=use_pdl)
    h_XI = gate_up(x, w13, ids, plan, config.gate_up, *act, use_pdl=use_pdl)
    y_XC = down(h_XI, w2, ids, weights, plan, config.down, use_pdl=use_pdl)
    return combine(y_XC, ids, add_TC, x.dtype, use_pdl=use_pdl)


def shared_mlp(
    x_TC: Tensor, shared: tuple[Tensor, Tensor] | None, alpha: float, limit: float, beta: float
) -> Tensor | None:
    if shared is None:
        return None
    return linear(linear(x_TC, shared[0], swiglu=SwiGLU(alpha, limit, beta)), shared[1])


def few_products(
    x_TC: Tensor,
    w13_E2IC: Tensor,
    w2_ECI: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    shared: tuple[Tensor, Tensor] | None,
    alpha: float,
    limit: float,
    beta: float,
    few: Few,
    *,
    use_pdl: bool,
) -> Tensor:
    """weight · w2 swiglu_oai(w13 x) of every pair and then of the shared expert, FP32."""
    (num_tokens, topk), hidden, width = ids_TA.shape, x_TC.shape[1], w2_ECI.shape[2]
    assert num_tokens <= MAX_FEW_TOKENS, "the shared expert has one tile"
    num_pairs = num_tokens * topk
    num_rows = num_pairs + (num_tokens if shared is not None else 0)
    h_XI = torch.empty(num_rows, width, dtype=x_TC.dtype, device=x_TC.device)
    y_XC = torch.empty(num_rows, hidden, dtype=torch.float32, device=x_TC.device)
    # As many as there can be; each expert has one if no token names it twice.
    max_tiles = num_pairs + (shared is not None)
    most = _num_sms(x_TC.device) * few.programs

    def launch(num_weight_rows: int, size: int) -> tuple[tuple[int], dict[str, int | bool]]:
        grid = (min(most, max_tiles * triton.cdiv(num_weight_rows, few.rows)),)
        can_prefetch = size % FEW_PREFETCH == 0 and x_TC.itemsize == 2
        return grid, {
            "HIDDEN": hidden,
            "WIDTH": width,
            "TOPK": topk,
            "HAS_SHARED": shared is not None,
            "BLOCK_P": max(16, triton.next_power_of_2(num_pairs)),
            "BLOCK_R": few.rows,
            "BLOCK_M": 16 if num_tokens <= 16 else 32,
            "BLOCK_K": few.depth,
            "PREFETCH": FEW_PREFETCH if can_prefetch else 0,
            "NUM_THREADS": 32 * FEW_WARPS,
            "USE_PDL": use_pdl,
            "launch_pdl": use_pdl,
            "num_warps": FEW_WARPS,
            "num_stages": few.stages,
        }

    shared_w13, shared_w2 = (w13_E2IC, w2_ECI) if shared is None else shared
    grid, options = launch(2 * width, hidden)
    decode_gate_up_kernel[grid](
        x_TC,
        w13_E2IC,
        shared_w13.contiguous(),
        ids_TA,
        h_XI,
        num_tokens,
        alpha,
        limit,
        beta,
        **options,
    )
    grid, options = launch(hidden, width)
    decode_down_kernel[grid](
        h_XI,
        w2_ECI,
        shared_w2.contiguous(),
        ids_TA,
        weights_TA,
        y_XC,
        num_tokens,
        **options,
    )
    return y_XC


def gate_up(
    x_TC: Tensor,
    w13_E2IC: Tensor,
    ids_TA: Tensor,
    plan: Plan,
    tiles: Tiles,
    alpha: float,
    limit: float,
    beta: float,
    *,
    use_pdl: bool,
) -> Tensor:
    """swiglu_oai(w13 x) of every pair, [T * A, I] in the plan's order."""
    hidden, width = x_TC.shape[1], w13_E2IC.shape[1] // 2
    h_XI = torch.empty(ids_TA.numel(), width, dtype=x_TC.dtype, device=x_TC.device)
    tiles = _fitting(tiles, w13_E2IC)
    gate_up_kernel[_grid(plan, width, tiles)](
        x_TC,
        _weights(w13_E2IC, tiles),
        plan.data,
        h_XI,
        plan.order_start,
        alpha,
        limit,
        beta,
        HIDDEN=hidden,
        WIDTH=width,
        TOPK=ids_TA.shape[1],
        **_launch(plan, tiles, use_pdl),
    )
    return h_XI


def down(
    h_XI: Tensor,
    w2_ECI: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    plan: Plan,
    tiles: Tiles,
    *,
    use_pdl: bool,
) -> Tensor:
    """weight · w2 h of every pair, [T * A, C] FP32 in the order of `ids_TA`."""
    _, hidden, width = w2_ECI.shape
    y_XC = torch.empty(ids_TA.numel(), hidden, dtype=torch.float32, device=h_XI.device)
    tiles = _fitting(tiles, w2_ECI)
    down_kernel[_grid(plan, hidden, tiles)](
        h_XI,
        _weights(w2_ECI, tiles),
        weights_TA,
        plan.data,
        y_XC,
        plan.order_start,
        HIDDEN=hidden,
        WIDTH=width,
        **_launch(plan, tiles, use_pdl),
    )
    return y_XC


def combine(
    y_XC: Tensor,
    ids_TA: Tensor,
    add_TC: Tensor | None,
    dtype: torch.dtype,
    plan: Plan | None = None,
    weights_TA: Tensor | None = None,
    *,
    use_pdl: bool,
) -> Tensor:
    """Σ over a token's pairs, in ascending expert id, + `add_TC`, [T, C].

    Rows of `y_XC` are pairs times their weights; with a plan they are in its order, and
    `weights_TA` is applied here.
    """
    num_tokens, topk = ids_TA.shape
    hidden = y_XC.shape[1]
    out_TC = torch.empty(num_tokens, hidden, dtype=dtype, device=y_XC.device)
    block_c = min(256 if num_tokens <= 64 else 2048, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, block_c))](
        y_XC,
        ids_TA,
        None if plan is None else plan.data,
        weights_TA,
        y_XC if add_TC is None else add_TC.contiguous(),
        out_TC,
        0 if plan is None else plan.place_start,
        HIDDEN=hidden,
        TOPK=topk,
        BLOCK_A=triton.next_power_of_2(topk),
        BLOCK_C=block_c,
        HAS_ADD=add_TC is not None,
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
        num_warps=2 if num_tokens <= 64 else 4,
    )
    return out_TC


def _fitting(tiles: Tiles, weight: Tensor) -> Tiles:
    """Without the copy engine where a row does not begin at 16 bytes."""
    is_aligned = weight.shape[-1] * weight.itemsize % 16 == 0 and weight.data_ptr() % 16 == 0
    return tiles if is_aligned else replace(tiles, tma=False)


def _weights(weight: Tensor, tiles: Tiles) -> Tensor | TensorDescriptor:
    if not tiles.tma:
        return weight
    rows = weight.view(-1, weight.shape[-1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tiles.cols, tiles.depth])


def _grid(plan: Plan, cols: int, tiles: Tiles) -> tuple[int]:
    num_tiles = plan.max_tiles * triton.cdiv(cols, tiles.cols)
    return (min(num_tiles, _num_sms(plan.data.device) * tiles.programs),)


def _launch(plan: Plan, tiles: Tiles, use_pdl: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_M": plan.tile_rows,
        "TAIL_M": plan.tail_rows,
        "BLOCK_N": tiles.cols,
        "BLOCK_K": tiles.depth,
        "GROUP": tiles.group,
        "SWAP": tiles.swap,
        "USE_TMA": tiles.tma,
        "USE_PDL": use_pdl,
        "launch_pdl": use_pdl,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _num_sms(device: torch.device) -> int:
    return num_multiprocessors(device) if device.type == "cuda" else 4
