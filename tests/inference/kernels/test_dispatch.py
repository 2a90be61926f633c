"""The house rules of op folders."""

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import inference.kernels
from inference.kernels import mxfp8
from inference.kernels.add_rows import add_rows
from inference.kernels.changed_values import ChangedTable
from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.dense_varlen import dense_varlen
from inference.kernels.dispatch import use_kernel
from inference.kernels.expert_gemm import expert_gemm
from inference.kernels.experts_mlp import experts_mlp
from inference.kernels.index_alignment import index_alignment
from inference.kernels.index_select import index_select
from inference.kernels.index_select_varlen import index_select_varlen
from inference.kernels.linear import linear
from inference.kernels.local_ids import local_ids
from inference.kernels.msa_attention import msa_attention
from inference.kernels.msa_varlen import msa_varlen
from inference.kernels.packing import Packing
from inference.kernels.paged_attention import paged_attention
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope import qk_norm_rope
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write
from inference.kernels.rms_norm import rms_norm
from inference.kernels.router import router
from inference.kernels.sample_logprob import sample_logprob
from inference.kernels.swiglu_oai import swiglu_oai
from inference.kernels.tensor_hash import tensor_hash

KERNELS = Path(inference.kernels.__file__).parent
OPS = sorted(path.parent.name for path in KERNELS.glob("*/__init__.py"))

Device = torch.device | str


def one_token(device: Device) -> tuple[PagedBatch, LayerPages]:
    units = plan_units(np.ones(1, np.int64), None, None, 1).to(device)
    batch = PagedBatch(
        positions_T=torch.zeros(1, dtype=torch.int64, device=device),
        slots_T=torch.zeros(1, dtype=torch.int64, device=device),
        query_start_R1=torch.tensor([0, 1]).int().to(device),
        seq_len_R=torch.ones(1).int().to(device),
        page_table_RN=torch.zeros(1, 1).int().to(device),
        page_size=4,
        num_decodes=1,
        max_query_len=1,
        max_seq_len=1,
        plan=DecodePlan(index=units, dense=units),
    )
    kv = torch.zeros(1, 1, 4, 8, device=device)
    return batch, LayerPages(kv, kv.clone(), torch.zeros(1, 4, 8, device=device))


def call_qk_norm_rope_write(device: Device) -> None:
    batch, pages = one_token(device)
    norms = QKNorms(*(torch.zeros(8, device=device) for _ in range(4)))
    qkv, cos_sin = torch.zeros(1, 40, device=device), torch.zeros(4, 4, device=device)
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "eps": 1e-6}
    qk_norm_rope_write(qkv, norms, cos_sin, batch, pages, **sizes)


def call_index_select(device: Device) -> None:
    batch, pages = one_token(device)
    q = torch.zeros(1, 1, 8, device=device)
    index_select(q, pages.index_pages, batch, topk_blocks=1, local_blocks=1)


def call_msa_attention(device: Device) -> None:
    batch, pages = one_token(device)
    blocks = torch.zeros(1, 1, 1, device=device).int()
    msa_attention(torch.zeros(1, 2, 8, device=device), pages, blocks, batch, scale=1.0)


def call_paged_attention(device: Device) -> None:
    batch, pages = one_token(device)
    paged_attention(torch.zeros(1, 2, 8, device=device), pages, batch, scale=1.0)


def call_router(device: Device) -> None:
    x, weight = torch.zeros(1, 4, device=device), torch.zeros(2, 4, device=device)
    router(x, weight, torch.zeros(2, device=device), topk=1, scale=1.0)


def call_expert_gemm(device: Device) -> None:
    x, w13 = torch.zeros(1, 4, device=device), torch.zeros(2, 6, 4, device=device)
    w2, ids = torch.zeros(2, 4, 3, device=device), torch.zeros(1, 1, device=device).int()
    expert_gemm(x, w13, w2, ids, torch.ones(1, 1, device=device), alpha=1.0, limit=7.0)


def call_add_rows(device: Device) -> None:
    y, index = torch.zeros(1, 4, device=device), torch.zeros(1, 2, device=device).int()
    add_rows(y, torch.zeros(1, 4, device=device), torch.zeros(0, 4, device=device), index)


def call_mxfp8(device: Device) -> None:
    mxfp8.quantize(torch.zeros(1, 32, device=device, dtype=torch.bfloat16))


def call_sample_logprob(device: Device) -> None:
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    count = torch.zeros(1, device=device, dtype=torch.int64)
    sample_logprob(
        torch.zeros(1, 4, device=device),
        temperature_R=one,
        top_k_R=count,
        top_p_R=one,
        min_p_R=zero,
        seeds_R=count,
        positions_R=count,
    )


def call_changed_values(device: Device) -> object:
    pair = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    return ChangedTable([pair]).count(0, 1, torch.zeros(1, dtype=torch.int32, device=device))


def call_varlen(op: str, device: Device) -> None:
    packing = Packing.of([1], torch.device(device))
    x_THD = torch.zeros(1, 1, 16, device=device, dtype=torch.bfloat16)
    blocks_TKB = torch.zeros(1, 1, 1, device=device, dtype=torch.int32)
    if op == "dense_varlen":
        dense_varlen(x_THD, x_THD, x_THD, packing, scale=1.0)
    elif op == "index_alignment":
        packing_rule = {"scale": 1.0, "index_scale": 1.0, "block_size": 16, "level": "token"}
        tensors = (x_THD, x_THD[:, 0], x_THD, x_THD, blocks_TKB)
        index_alignment(*tensors, packing, **packing_rule)
    elif op == "msa_varlen":
        msa_varlen(x_THD, x_THD, x_THD, blocks_TKB, packing, scale=1.0, block_size=16)
    else:
        index_select_varlen(
            x_THD, x_THD[:, 0], packing, block_size=16, topk_blocks=1, local_blocks=1
        )


def call_experts_mlp(device: Device) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    ids_TA = torch.zeros(1, 1, dtype=torch.int64, device=device)
    weights_TA = torch.zeros(1, 1, device=device)
    gate_up, down = zeros(1, 16, 8), zeros(1, 8, 8)
    experts_mlp(zeros(1, 8), ids_TA, weights_TA, gate_up, down, alpha=1.0, limit=1.0)


CALLS: dict[str, Callable[[Device], object]] = {
    "experts_mlp": call_experts_mlp,
    "dense_varlen": lambda device: call_varlen("dense_varlen", device),
    "index_alignment": lambda device: call_varlen("index_alignment", device),
    "index_select_varlen": lambda device: call_varlen("index_select_varlen", device),
    "msa_varlen": lambda device: call_varlen("msa_varlen", device),
    "add_rows": call_add_rows,
    "changed_values": call_changed_values,
    "expert_gemm": call_expert_gemm,
    "index_select": call_index_select,
    "linear": lambda device: linear(
        torch.zeros(1, 4, device=device), torch.zeros(2, 4, device=device)
    ),
    "local_ids": lambda device: local_ids(torch.zeros(1, 1, device=device).int(), 0, 1),
    "msa_attention": call_msa_attention,
    "mxfp8": call_mxfp8,
    "paged_attention": call_paged_attention,
    "qk_norm_rope_write": call_qk_norm_rope_write,
    "qk_norm_rope": lambda device: qk_norm_rope(
        torch.zeros(1, 1, 4, device=device),
        torch.zeros(4, device=device),
        torch.zeros(1, 2, device=device),
        eps=1e-6,
    ),
    "rms_norm": lambda device: rms_norm(
        torch.zeros(1, 4, device=device), torch.zeros(4, device=device), 1e-6
    ),
    "router": call_router,
    "sample_logprob": call_sample_logprob,
    "swiglu_oai": lambda device: swiglu_oai(torch.zeros(1, 4, device=device), alpha=1.0, limit=7.0),
    "tensor_hash": lambda device: tensor_hash(torch.zeros(4, device=device), name="w"),
}


def test_every_op_has_a_call_here():
    assert sorted(CALLS) == OPS


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_reference_a_test_and_a_row_in_the_table(op):
    assert (KERNELS / op / "reference.py").is_file()
    assert (Path(__file__).parent / f"test_{op}.py").is_file()
    assert f"| `{op}` |" in (KERNELS / "README.md").read_text()


@pytest.mark.parametrize("op", OPS)
def test_an_op_without_a_kernel_raises_instead_of_falling_back(op):
    CALLS[op]("cpu")
    with pytest.raises(NotImplementedError, match=rf"{op}.*: no META kernel"):
        CALLS[op]("meta")


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_on_cuda(op, cuda):
    CALLS[op](cuda)


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"router: tensors lie on \['cpu', 'meta'\]"):
        use_kernel("router", torch.zeros(1), torch.zeros(1, device="meta"), None)


def test_the_poison_is_real():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert torch.zeros(3).new_empty(2).isnan().all()
    assert (torch.empty(3, dtype=torch.int64) == 77).all()


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*kernel.py")), ids=lambda path: path.stem)
def test_every_kernel_file_can_be_imported_without_a_gpu(path):
    # The Gluon ones run on a GPU alone, so nothing else here would see a name that is gone.
    name = ".".join(path.relative_to(KERNELS.parents[1]).with_suffix("").parts)
    importlib.import_module(name)
