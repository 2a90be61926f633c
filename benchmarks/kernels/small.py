"""The elementwise kernels between the products, and those that take weights over in tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.harness import (
    Bench,
    Timing,
    floor_us,
    relative_error,
    time_eager,
    time_graph,
)
from inference.kernels.copy_table import CopyTable
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable
from inference.kernels.mxfp8 import reference as mxfp8_reference
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write
from inference.kernels.qk_norm_rope_write import reference as qk_reference
from inference.kernels.rms_norm import reference as norm_reference
from inference.kernels.rms_norm import rms_norm
from inference.kernels.swiglu_oai import reference as swiglu_reference
from inference.kernels.swiglu_oai import swiglu_oai
from inference.kernels.tensor_hash import HashTable, hash_part, unit_of
from inference.kernels.tensor_hash import reference as hash_reference

HIDDEN, WIDTH, DENSE_WIDTH = 6144, 3072, 12288
HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE = 64, 4, 128, 64, 128
ROWS = (1, 32, 128, 8192)
NUM_WEIGHTS = 32
"""Expert matrices of a table: 1.2 GB in BF16, many times the L2."""
TOLERANCE = {"error": 1e-3}
"""Both sides round to BF16 once; only FP32 sums differ, which seldom turns a rounding."""


def run(bench: Bench) -> None:
    for num_rows in ROWS:
        bench.case(f"rms_norm {num_rows}", lambda t=num_rows: _rms_norm(bench, t))
        for width in (WIDTH, DENSE_WIDTH):
            name = f"swiglu {num_rows}x{width}"
            bench.case(name, lambda t=num_rows, i=width, n=name: _swiglu(bench, t, i, n))
        bench.case(f"qk {num_rows}", lambda t=num_rows: _qk(bench, t, torch.bfloat16))
    bench.case("qk 8192 fp8", lambda: _qk(bench, 8192, torch.float8_e4m3fn))
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        bench.case(f"hash {dtype}", lambda d=dtype: _hash(bench, d))
    bench.case("quantise", lambda: _quantize(bench))
    for width in (HIDDEN, HIDDEN // 2):
        bench.case(f"copy {width}", lambda w=width: _copy(bench, w))


def _time(call: Callable[[], object], num_rows: int) -> Timing:
    """Decode steps replay graphs; prefill launches one by one."""
    return time_graph([call], inner=50) if num_rows <= 128 else time_eager(call)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _rms_norm(bench: Bench, num_rows: int) -> None:
    x, residual, weight = _normal(num_rows, HIDDEN), _normal(num_rows, HIDDEN), _normal(HIDDEN)
    found = rms_norm(x, weight, 1e-6, residual)
    wanted = norm_reference.rms_norm(x, weight, 1e-6, residual)
    error = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
    bench.record(
        "small_ops",
        f"rms_norm+residual {num_rows}x{HIDDEN}",
        _time(lambda: rms_norm(x, weight, 1e-6, residual), num_rows),
        correct={"error": error},
        tolerance=TOLERANCE,
        floor=floor_us(num_rows * HIDDEN * 2 * 4),
    )


def _swiglu(bench: Bench, num_rows: int, width: int, name: str) -> None:
    gate_up, options = _normal(num_rows, 2 * width) * 3, {"alpha": 1.702, "limit": 7.0}
    wanted = swiglu_reference.swiglu_oai(gate_up, beta=1.0, **options)
    bench.record(
        "small_ops",
        name,
        _time(lambda: swiglu_oai(gate_up, **options), num_rows),
        correct={"error": relative_error(swiglu_oai(gate_up, **options), wanted)},
        tolerance=TOLERANCE,
        floor=floor_us(num_rows * width * 2 * 3),
    )


def qk_case(num_tokens: int, page_dtype: torch.dtype) -> tuple[tuple, tuple[int, int, int]]:
    """Tensor arguments of the op at M3's shape, then (query heads, KV heads, head dim)."""
    num_pages = -(-num_tokens // PAGE) + 64
    slots = torch.randperm(num_pages * PAGE, device="cuda")[:num_tokens]
    batch = PagedBatch(
        positions_T=torch.randint(100_000, (num_tokens,), device="cuda"),
        slots_T=slots,
        query_start_R1=torch.arange(num_tokens + 1, device="cuda").int(),
        seq_len_R=torch.ones(num_tokens, device="cuda").int(),
        page_table_RN=torch.zeros(num_tokens, 1, device="cuda").int(),
        page_size=PAGE,
        num_decodes=num_tokens,
        max_query_len=1,
        max_seq_len=1,
    )
    kv = (num_pages, KV_HEADS, PAGE, HEAD_DIM)
    pages = LayerPages(
        torch.zeros(kv, dtype=page_dtype, device="cuda"),
        torch.zeros(kv, dtype=page_dtype, device="cuda"),
        torch.zeros((num_pages, PAGE, HEAD_DIM), dtype=page_dtype, device="cuda"),
    )
    qkv = _normal(num_tokens, (HEADS + 3 * KV_HEADS + 1) * HEAD_DIM)
    norms = QKNorms(*(_normal(HEAD_DIM) for _ in range(4)))
    angles = torch.rand(100_000, ROTARY // 2, device="cuda") * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    return (qkv, norms, cos_sin, batch, pages), (HEADS, KV_HEADS, HEAD_DIM)


def _qk(bench: Bench, num_tokens: int, page_dtype: torch.dtype) -> None:
    args, (num_heads, num_kv_heads, head_dim) = qk_case(num_tokens, page_dtype)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    found = qk_norm_rope_write(*args, **sizes, eps=1e-6)
    found_pages = args[-1]
    pages = LayerPages(*(torch.zeros_like(t) for t in _tensors(found_pages)))
    wanted = qk_reference.qk_norm_rope_write(
        *args[:-1], pages, num_heads, num_kv_heads, head_dim, 1e-6
    )
    pairs = [*zip(found, wanted, strict=True)]
    pairs += zip(_tensors(found_pages), _tensors(pages), strict=True)
    error = max(relative_error(a.float(), b.float()) for a, b in pairs)
    element = 1 if page_dtype == torch.float8_e4m3fn else 2
    num_written = 2 * KV_HEADS + 1
    num_bytes = num_tokens * HEAD_DIM * (77 * 2 + 68 * 2 + num_written * element)
    fp8 = " fp8" if element == 1 else ""
    bench.record(
        "small_ops",
        f"qk_norm_rope_write {num_tokens}{fp8}",
        _time(lambda: qk_norm_rope_write(*args, **sizes, eps=1e-6), num_tokens),
        correct={"error": error},
        # One FP8 rounding that turns weighs 32 times as much.
        tolerance={"error": 1e-3 if element == 2 else 3e-3},
        floor=floor_us(num_bytes + num_tokens * ROTARY * 4),
    )


def _tensors(pages: LayerPages) -> list[Tensor]:
    return [t for t in (pages.k_pages, pages.v_pages, pages.index_pages) if t is not None]


def _hash(bench: Bench, dtype: torch.dtype) -> None:
    weights = _normal(NUM_WEIGHTS, WIDTH, HIDDEN).view(dtype)
    unit = unit_of(dtype, weights.shape[-1:])
    parts = [
        hash_part(weight, name=f"w{i}", unit=unit, check_finite=dtype != torch.uint8)
        for i, weight in enumerate(weights)
    ]
    table = HashTable(parts)
    table.launch(0, NUM_WEIGHTS)
    wanted = hash_reference.tensor_hash(*parts[-1][:-1])
    correct = {"wrong": float(table.read()[-1] != wanted)}
    timing = time_eager(lambda: table.launch(0, NUM_WEIGHTS))
    num_bytes = weights.numel() * weights.element_size()
    bench.record(
        "small_ops",
        f"hash of {NUM_WEIGHTS} experts' {str(dtype).removeprefix('torch.')} x{unit}",
        timing,
        correct=correct,
        tolerance={"wrong": 0.0},
        floor=floor_us(num_bytes),
        value={"tb_s": num_bytes / timing.us / 1e6},
    )


def _quantize(bench: Bench) -> None:
    x = _normal(NUM_WEIGHTS, WIDTH, HIDDEN)
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(NUM_WEIGHTS, WIDTH, HIDDEN // 32, dtype=torch.uint8, device="cuda")
    table = QuantizeTable([(x[i], MXFP8Tensor(values[i], scale[i])) for i in range(NUM_WEIGHTS)])
    table.launch(0, NUM_WEIGHTS)
    wanted = mxfp8_reference.quantize(x[-1])
    pairs = zip((values[-1], scale[-1]), wanted, strict=True)
    wrong = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
    bench.record(
        "small_ops",
        f"quantise {NUM_WEIGHTS} experts' weights to MXFP8",
        time_eager(lambda: table.launch(0, NUM_WEIGHTS)),
        correct={"wrong bytes": float(wrong)},
        tolerance={"wrong bytes": 0.0},
        floor=floor_us(x.numel() * (3 + 1 / 32)),
    )


def _copy(bench: Bench, width: int) -> None:
    """Whole matrices, or the same columns of each."""
    source, out = (_normal(NUM_WEIGHTS, WIDTH, HIDDEN)[..., :width] for _ in range(2))
    table = CopyTable(list(zip(source, out, strict=True)))
    table.launch(0, NUM_WEIGHTS)
    correct = {"wrong": float((source != out).sum())}
    peer = time_eager(lambda: out.copy_(source))
    bench.record(
        "small_ops",
        f"copy {NUM_WEIGHTS} x {WIDTH} rows of {2 * width} bytes",
        time_eager(lambda: table.launch(0, NUM_WEIGHTS)),
        correct=correct,
        tolerance={"wrong": 0.0},
        floor=floor_us(2 * 2 * source.numel()),
        peer=("torch copy_ in one call", peer.us),
    )
