"""Routed experts as two grouped products: align, gate and up, down, sum.

The weights of the experts that were hit are read once: at decode sizes that is the whole cost.
Launch grids follow from shapes alone, so a call can be captured in a CUDA graph; how many tiles
there are stands in device memory.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inference.kernels.expert_gemm.align_kernel import Plan, align
from inference.kernels.expert_gemm.gemm_kernel import combine_kernel, down_kernel, gate_up_kernel

USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Programmatic dependent launch: the launch itself overlaps the end of the kernel before."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut: `cols` of the output (gates, for the first) a tile."""

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
    flatten: bool = False
    tail: int | None = None
    """Rows of the smaller product that a tile with no more rows takes."""


@dataclass(frozen=True, slots=True)
class Config:
    """`rows` a tile, shared by both products because they share the plan."""

    rows: int
    gate_up: Tiles
    down: Tiles


def config_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Config:
    """By the rows an expert gets on average, as if no pair were another rank's."""
    if dtype.itemsize > 2:
        tiles = Tiles(cols=32, depth=32, warps=4, stages=2, programs=2, tma=False)
        return Config(16, tiles, tiles)
    rows = num_pairs / num_experts
    if rows > 48:
        return Config(
            128,
            Tiles(cols=128, depth=64, warps=8, stages=4, group=8, tail=64),
            Tiles(cols=256, depth=64, warps=8, stages=4, group=8, tail=64),
        )
    if rows > 10:
        few = Tiles(cols=64, depth=64, warps=4, stages=4, programs=2, group=2, swap=True)
        return Config(32 if rows <= 22 else 64, few, replace(few, cols=128))
    few = Tiles(cols=64, depth=128, warps=4, stages=3, programs=2, group=2, swap=True)
    return Config(16, few, replace(few, cols=128))


def expert_gemm(
    x_TC: Tensor,
    w13_E2IC: Tensor,
    w2_ECI: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    add_TC: Tensor | None = None,
    *,
    config: Config | None = None,
    use_pdl: bool = USE_PDL,
) -> Tensor:
    num_experts = w13_E2IC.shape[0]
    x, ids, weights, w13, w2 = (
        tensor.contiguous() for tensor in (x_TC, ids_TA, weights_TA, w13_E2IC, w2_ECI)
    )
    if not x.shape[0]:
        return torch.empty_like(x)
    config = config or config_for(ids.numel(), num_experts, w13.dtype)
    plan = plan_for(ids, num_experts, config.rows, use_pdl=use_pdl)
    h_XI = gate_up(x, w13, ids, plan, config.gate_up, alpha, limit, beta, use_pdl=use_pdl)
    y_XC = down(h_XI, w2, ids, weights, plan, config.down, use_pdl=use_pdl)
    return combine(y_XC, ids, add_TC, x.dtype, use_pdl=use_pdl)


def plan_for(ids_TA: Tensor, num_experts: int, tile_rows: int, *, use_pdl: bool) -> Plan:
    """The plan of `align`; one token needs none, its pairs are its tiles."""
    if ids_TA.shape[0] == 1:
        return Plan(ids_TA, tile_rows, ids_TA.numel(), is_direct=True)
    return align(ids_TA, num_experts, tile_rows, use_pdl=use_pdl)


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
        ids_TA,
        plan.data,
        h_XI,
        plan.order_start,
        plan.max_tiles,
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
        ids_TA,
        weights_TA,
        plan.data,
        y_XC,
        plan.order_start,
        plan.max_tiles,
        HIDDEN=hidden,
        WIDTH=width,
        **_launch(plan, tiles, use_pdl),
    )
    return y_XC


def combine(
    y_XC: Tensor, ids_TA: Tensor, add_TC: Tensor | None, dtype: torch.dtype, *, use_pdl: bool
) -> Tensor:
    """Σ over a token's pairs, in ascending expert id, + `add_TC`, [T, C]."""
    num_tokens, topk = ids_TA.shape
    hidden = y_XC.shape[1]
    out_TC = torch.empty(num_tokens, hidden, dtype=dtype, device=y_XC.device)
    block_c = min(512 if num_tokens <= 64 else 2048, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, block_c))](
        y_XC,
        ids_TA,
        y_XC if add_TC is None else add_TC.contiguous(),
        out_TC,
        HIDDEN=hidden,
        TOPK=topk,
        BLOCK_A=triton.next_power_of_2(topk),
        BLOCK_C=block_c,
        HAS_ADD=add_TC is not None,
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
        num_warps=4,
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
        "TAIL_M": tiles.tail or plan.tile_rows,
        "BLOCK_N": tiles.cols,
        "BLOCK_K": tiles.depth,
        "GROUP": tiles.group,
        "SWAP": tiles.swap,
        "DIRECT": plan.is_direct,
        "USE_TMA": tiles.tma,
        "FLATTEN": tiles.flatten,
        "USE_PDL": use_pdl,
        "launch_pdl": use_pdl,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
