"""Paged batches with poisoned memory, for every op that reads or writes pages."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.paging import LayerPages, PagedBatch


@pytest.fixture(
    params=[
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        )
    ]
)
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """The device of a kernel test; such a test compares the op there with its reference here."""
    return torch.device(request.param)


@pytest.fixture
def kernel_device() -> torch.device:
    """Where Triton kernels can run: the GPU, or the CPU through Triton's interpreter.

    The interpreter's bf16 products are garbage: feed float32 or float16 where it is the CPU.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin hold NaN (or a wild integer): an unwritten output is seen."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: object, **kwargs: object) -> Tensor:
            tensor = allocate(*args, **kwargs)
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)
            return tensor

        return allocate_poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@dataclass
class PagedCase:
    """Requests with random histories, scattered over shuffled pages of NaN-filled memory."""

    query_lens: list[int]
    seq_lens: list[int]
    page_size: int
    num_kv_heads: int = 2
    head_dim: int = 8
    index_dim: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0
    batch: PagedBatch = field(init=False)
    pages: LayerPages = field(init=False)
    keys: list[Tensor] = field(init=False, default_factory=list)
    """Of each request, [S, K, D]."""
    values: list[Tensor] = field(init=False, default_factory=list)
    index_keys: list[Tensor] = field(init=False, default_factory=list)
    """Of each request, [S, index_dim]."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        pages_of = [-(-length // self.page_size) for length in self.seq_lens]
        num_pages = sum(pages_of) + 3
        shuffled = torch.randperm(num_pages, generator=self.generator).tolist()
        # One column more than any request needs, as an engine that reuses its buffers has.
        table_RN = torch.full((len(self.seq_lens), max(pages_of, default=0) + 1), -1).int()
        for row, count in enumerate(pages_of):
            table_RN[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)]).int()
        shape = (num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        self.pages = LayerPages(
            k_pages=torch.full(shape, torch.nan, dtype=self.dtype),
            v_pages=torch.full(shape, torch.nan, dtype=self.dtype),
            index_pages=torch.full(
                (num_pages, self.page_size, self.index_dim), torch.nan, dtype=self.dtype
            ),
        )
        positions = [
            torch.arange(max(length - queries, 0), max(length - queries, 0) + queries)
            for queries, length in zip(self.query_lens, self.seq_lens, strict=True)
        ]
        slots = []
        for row, length in enumerate(self.seq_lens):
            slots_S = self._slots(table_RN[row], torch.arange(length))
            self._write_history(slots_S)
            new_Q = slots_S[max(length - self.query_lens[row], 0) :]
            slots.append(new_Q if length else torch.full((self.query_lens[row],), -1))
        self.batch = PagedBatch(
            positions_T=torch.cat([*positions, torch.zeros(0, dtype=torch.int64)]),
            slots_T=torch.cat([*slots, torch.zeros(0, dtype=torch.int64)]),
            query_start_R1=torch.tensor([0, *self.query_lens]).cumsum(0).int(),
            seq_len_R=torch.tensor(self.seq_lens).int(),
            page_table_RN=table_RN,
            page_size=self.page_size,
            num_decodes=sum(queries == 1 for queries in self.query_lens),
            max_query_len=max(self.query_lens, default=0),
            max_seq_len=max(self.seq_lens, default=0),
        )

    def _slots(self, pages_N: Tensor, positions: Tensor) -> Tensor:
        return pages_N[positions // self.page_size].long() * self.page_size + (
            positions % self.page_size
        )

    def _write_history(self, slots_S: Tensor) -> None:
        page, offset = slots_S // self.page_size, slots_S % self.page_size
        keys, values = (self.randn(len(slots_S), self.num_kv_heads, self.head_dim) for _ in "kv")
        index_keys = self.randn(len(slots_S), self.index_dim)
        self.pages.k_pages[page, :, offset] = keys
        self.pages.v_pages[page, :, offset] = values
        assert self.pages.index_pages is not None
        self.pages.index_pages[page, offset] = index_keys
        self.keys.append(keys)
        self.values.append(values)
        self.index_keys.append(index_keys)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def to(self, device: torch.device) -> "PagedCase":
        """The same case on `device`; `keys`, `values`, `index_keys` and `randn` stay on the CPU."""
        other = copy.copy(self)
        other.batch = replace(
            self.batch,
            **{
                field.name: value.to(device)
                for field in fields(self.batch)
                if isinstance(value := getattr(self.batch, field.name), Tensor)
            },
        )
        other.pages = LayerPages(
            *(
                None if pages is None else pages.to(device)
                for pages in (self.pages.k_pages, self.pages.v_pages, self.pages.index_pages)
            )
        )
        return other

    def plan(self, num_workers: int, groups: tuple[list[int], list[int]] | None = None) -> None:
        """Set `batch.plan`; groups are (bounds of neighbouring decodes, pages that each shares)."""
        num_pages_R = -(-np.array(self.seq_lens[: self.batch.num_decodes]) // self.page_size)
        bounds = (None, None) if groups is None else tuple(np.array(part) for part in groups)
        units = plan_units(num_pages_R, *bounds, num_workers).to(self.batch.positions_T.device)
        self.batch.plan = DecodePlan(index=units, dense=units)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def tokens(self) -> list[tuple[int, int, int]]:
        """(token, request, position) of every real token."""
        starts = self.batch.query_start_R1.tolist()
        return [
            (token, row, int(self.batch.positions_T[token]))
            for row, (start, stop) in enumerate(pairwise(starts))
            if self.seq_lens[row]
            for token in range(start, stop)
        ]


@pytest.fixture
def paged() -> type[PagedCase]:
    return PagedCase


def attention_oracle(q_HD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, scale: float) -> Tensor:
    """Attention of one token over exactly these keys, in FP64, head by head."""
    num_heads, num_kv_heads = q_HD.shape[0], keys_SKD.shape[1]
    out = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        logits_S = keys_SKD[:, kv_head].double() @ q_HD[head].double() * scale
        out.append(logits_S.softmax(0) @ values_SKD[:, kv_head].double())
    return torch.stack(out)


@pytest.fixture(name="attention_oracle")
def attention_oracle_fixture() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    return attention_oracle
