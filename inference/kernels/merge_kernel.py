"""What the two decode attentions share: a step of the online softmax, the merge of split work.

Logits are in base 2 (`scale` carries log2(e)). Masked logits are -inf and the running maximum
starts at a finite value, so a row that sees nothing yields no NaN: output 0, log-sum-exp -inf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_MAX = tl.constexpr(-1e30)
"""Where running maxima start."""
LOG2_E = 1.4426950408889634


def product_type(q_THD: Tensor, k_pages: Tensor) -> tl.dtype:
    """What the tensor cores multiply: FP8 is exact in FP16, and q there after its norm."""
    if q_THD.dtype == torch.float32:
        return tl.float32
    if k_pages.dtype == torch.float8_e4m3fn or q_THD.dtype == torch.float16:
        return tl.float16
    return tl.bfloat16


def as_pairs(q_THD: Tensor, pages: Tensor) -> Tensor | None:
    """FP8 pages as int16 pairs for `attend_pairs`, None where `attend_tile` must do."""
    head_dim = pages.shape[-1]
    is_fit = head_dim >= 32 and head_dim & (head_dim - 1) == 0
    is_low = pages.dtype == torch.float8_e4m3fn and q_THD.dtype != torch.float32
    return pages.view(torch.int16) if q_THD.is_cuda and is_low and is_fit else None


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """Wait until what earlier kernels wrote is visible, and let the next kernel's launch begin."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_last(PDL: tl.constexpr):
    """As `begin_dependent`, and the next kernel may be launched before the wait is over.

    That kernel must not assume that more than its own wait tells it has been written.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_at_end(PDL: tl.constexpr):
    """For a kernel that reads nothing of the one before it: it ends no earlier than that one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def attend_tile(
    b_q,
    b_k,
    b_v,
    m_visible,
    b_m,
    b_l,
    b_acc,
    scale,
    TYPE: tl.constexpr,
):
    """Add one tile of keys to (maximum b_m [M], weights b_l [M, N], output b_acc [M, D]).

    b_l is summed over keys only at the end.
    """
    b_k = b_k.to(TYPE)
    b_v = b_v.to(TYPE)
    # [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    b_s = tl.where(m_visible, b_s, float("-inf"))
    b_max = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_max[:, None])
    b_decay = tl.exp2(b_m - b_max)
    b_l = b_l * b_decay[:, None] + b_p
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_p.to(TYPE), b_v, acc=b_acc, input_precision="ieee")
    return b_max, b_l, b_acc


@triton.jit
def _halves_of_pairs(b_x):
    """FP16 values of the low and of the high bytes of int16 pairs of FP8 (e4m3), exact."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r",
        args=[b_x],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def attend_pairs(b_q0, b_q1, b_k, b_v, m_visible, b_m, b_l, b_acc0, b_acc1, scale):
    """`attend_tile` where b_k and b_v hold pairs of FP8 values in int16: [N, D / 2].

    A pair is moved through shared memory as one 16-bit value, which the tensor cores' loads can
    transpose. Queries and outputs are two: of the even and of the odd places of D.
    """
    b_k0, b_k1 = _halves_of_pairs(b_k)
    b_v0, b_v1 = _halves_of_pairs(b_v)
    b_s = tl.dot(b_q0, tl.trans(b_k0))
    b_s = tl.dot(b_q1, tl.trans(b_k1), acc=b_s) * scale
    b_s = tl.where(m_visible, b_s, float("-inf"))
    b_max = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_max[:, None])
    b_decay = tl.exp2(b_m - b_max)
    b_l = b_l * b_decay[:, None] + b_p
    b_p = b_p.to(tl.float16)
    b_acc0 = tl.dot(b_p, b_v0, acc=b_acc0 * b_decay[:, None])
    b_acc1 = tl.dot(b_p, b_v1, acc=b_acc1 * b_decay[:, None])
    return b_max, b_l, b_acc0, b_acc1


@triton.jit
def interleaved(b_acc0, b_acc1):
    """One output of the two of `attend_pairs`."""
    return tl.reshape(tl.join(b_acc0, b_acc1), (b_acc0.shape[0], 2 * b_acc0.shape[1]))


@triton.jit
def normalised(b_m, b_l, b_acc):
    """(output [M, D], log-sum-exp [M]) of what `attend_tile` has gathered."""
    b_sum = tl.sum(b_l, 1)
    b_safe = tl.where(b_sum > 0, b_sum, 1.0)
    b_lse = tl.where(b_sum > 0, b_m + tl.log2(b_safe), float("-inf"))
    return b_acc * (1.0 / b_safe)[:, None], b_lse


@triton.jit
def merge_parts(b_o, b_lse, b_m, b_l, b_acc):
    """Add parts b_o [P, D] with log-sum-exps b_lse [P] to (maximum, weight, output [D])."""
    b_max = tl.maximum(b_m, tl.max(b_lse, 0))
    # [P]
    b_w = tl.exp2(b_lse - b_max)
    b_decay = tl.exp2(b_m - b_max)
    b_l = b_l * b_decay + tl.sum(b_w, 0)
    b_acc = b_acc * b_decay + tl.sum(b_o.to(tl.float32) * b_w[:, None], 0)
    return b_max, b_l, b_acc
