import contextlib

import pytest
import torch

from inference.kernels.msa_attention import block_hopper_kernel, block_kernel, reference
from inference.kernels.msa_attention.block_kernel import BlockMajor
from inference.kernels.msa_attention.invert_kernel import invert_blocks
from inference.kernels.msa_attention.prefill_kernel import (
    QueryMajor,
    choose_launch,
    msa_attention_prefill,
)
from inference.kernels.msa_attention.widen_kernel import wide_bytes, widen_pages

WAYS = {
    "queries": QueryMajor(tile=16, num_stages=1),
    "queries-split3": QueryMajor(split=3, tile=16, num_stages=2),
    "blocks": BlockMajor(slab=64, unit=16, rows=16),
    "blocks-slabs": BlockMajor(slab=8, heads=2, unit=8, rows=32),
}
CASES = {
    "one-token-after-a-decode": ([1, 3], [9, 9]),
    "from-zero": ([21], [21]),
    "many": ([1, 1, 5, 13, 2], [41, 13, 5, 40, 66]),
}


def random_blocks(case, topk: int, local: bool = True) -> torch.Tensor:
    """Any choice among the blocks up to the query's own, ids ascending, then -1."""
    blocks = torch.full((case.num_tokens, case.num_kv_heads, topk), -1, dtype=torch.int32)
    for token, _, position in case.tokens():
        own = position // case.page_size
        for head in range(case.num_kv_heads):
            others = torch.randperm(own + (not local), generator=case.generator)
            chosen = others[: topk - local].tolist() + [own] * local
            blocks[token, head, : len(chosen)] = torch.tensor(sorted(chosen)).int()
    return blocks


def assert_like_reference(case, device, heads, blocks, launch, tolerance=1e-5, dtype=None):
    q = case.randn(case.num_tokens, heads, case.head_dim).to(dtype or case.dtype)
    expected = reference.msa_attention(q.float(), case.pages, blocks, case.batch, 0.3)
    placed = case.to(device)
    # Strides beyond the contiguous ones: a part of a wider projection.
    wide = torch.full((case.num_tokens, heads + 2, case.head_dim), torch.nan, dtype=q.dtype)
    wide[:, :heads] = q
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    msa_attention_prefill(
        wide.to(device)[:, :heads],
        placed.pages,
        blocks.to(device),
        placed.batch,
        0.3,
        out,
        launch,
    )
    first = case.batch.num_decode_tokens
    assert out[:first].isnan().all()
    found, wanted = out[first:].cpu().float(), expected[first:]
    assert found.isfinite().all()
    error = (found - wanted).norm() / wanted.norm().clamp(min=1e-6)
    assert error <= tolerance, f"relative error {error}"


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("launch", WAYS.values(), ids=WAYS)
def test_equals_reference(paged, kernel_device, launch, lengths):
    case = paged(*lengths, page_size=8)
    blocks = random_blocks(case, topk=3)
    assert_like_reference(case, kernel_device, 4, blocks, launch)


@pytest.mark.parametrize(
    ("page_size", "num_kv_heads", "heads", "head_dim", "topk"),
    [(4, 1, 3, 8, 3), (16, 2, 16, 24, 2)],
)
@pytest.mark.parametrize("launch", [WAYS["queries"], WAYS["blocks"]], ids=["queries", "blocks"])
def test_shapes(paged, kernel_device, launch, page_size, num_kv_heads, heads, head_dim, topk):
    case = paged(
        [4, 13], [50, 13], page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    blocks = random_blocks(case, topk, local=False)
    assert_like_reference(case, kernel_device, heads, blocks, launch)


@pytest.mark.parametrize("launch", [WAYS["queries-split3"], WAYS["blocks"]])
def test_nothing_chosen_and_blocks_that_do_not_exist_give_zeros(paged, kernel_device, launch):
    case = paged([5, 6], [20, 11], page_size=4)
    blocks = torch.full((11, 2, 3), -1, dtype=torch.int32)
    blocks[3, 0] = torch.tensor([77, 5, -1])
    blocks[4, 1] = torch.tensor([1 << 30, -1, -1])
    # In the future of its query, and beyond the second request's blocks.
    blocks[0, 1, 0] = 4
    blocks[7, 0, 0] = 3
    q = case.randn(11, 4, 8)
    out = torch.empty_like(q, device=kernel_device)
    placed = case.to(kernel_device)
    msa_attention_prefill(
        q.to(kernel_device),
        placed.pages,
        blocks.to(kernel_device),
        placed.batch,
        0.3,
        out,
        launch,
    )
    assert torch.equal(out.cpu(), torch.zeros(11, 4, 8))


@pytest.mark.parametrize("launch", [WAYS["queries"], WAYS["blocks"]], ids=["queries", "blocks"])
def test_no_other_key_changes_a_bit(paged, kernel_device, launch):
    case = paged([9], [60], page_size=4)
    blocks = random_blocks(case, topk=3)
    q = case.randn(9, 4, 8).to(kernel_device)

    def run() -> torch.Tensor:
        placed, out = case.to(kernel_device), torch.empty_like(q)
        msa_attention_prefill(
            q, placed.pages, blocks.to(kernel_device), placed.batch, 0.3, out, launch
        )
        return out

    before = run()
    for head in range(2):
        unread = set(range(15)) - set(blocks[:, head].flatten().tolist())
        assert unread
        for block in unread:
            page = int(case.batch.page_table_RN[0, block])
            case.pages.k_pages[page, head] = torch.nan
            case.pages.v_pages[page, head] = torch.inf
    assert torch.equal(run(), before)


@pytest.mark.parametrize(("slab", "heads"), [(64, 1), (10, 1), (10, 2)])
def test_lists_hold_every_choice_once(paged, kernel_device, slab, heads):
    case = paged([1, 7, 30], [9, 40, 33], page_size=4)
    blocks = random_blocks(case, topk=3)[1:]
    placed = case.to(kernel_device)
    lists = invert_blocks(
        blocks.to(kernel_device), placed.batch, slab=slab, heads=heads, tile=2, unit=6
    )
    units = lists.units_PU4.cpu()
    slabs = -(-37 // slab)
    found = set()
    for index, count in enumerate(lists.num_units_P.tolist()):
        for place, row, packed, first_key in units[index, :count].tolist():
            page, head = divmod(place, 2)
            assert head // heads == index // slabs
            num_queries, num_keys = packed & 0xFFFF, packed >> 16 & 0x7FFF
            assert 1 <= num_queries <= 6
            assert row % 2 == 0
            for i_row in range(row, row + num_queries):
                token = int(lists.tokens_PL[index, i_row])
                assert token // slab == index % slabs
                request = 1 + (token >= 7)
                choice = blocks[token, head].tolist().index(first_key // 4)
                assert int(lists.row_TKB[token, head, choice]) == i_row
                assert int(case.batch.page_table_RN[request, first_key // 4]) == page
                assert num_keys == min(4, case.seq_lens[request] - first_key)
                position = int(case.batch.positions_T[1 + token])
                assert (packed < 0) == (first_key + 3 > position)
                found.add((token, head, choice))
    assert len(found) == int((blocks >= 0).sum())
    assert torch.equal(lists.row_TKB.cpu() >= 0, blocks >= 0)


def test_the_way_is_chosen_by_length(paged):
    case = paged([1600], [1600], page_size=128, num_kv_heads=1, dtype=torch.bfloat16)
    q = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
    for tokens, heads, way in (
        (1, 4, QueryMajor),
        (1536, 4, QueryMajor),
        (1600, 1, QueryMajor),
        (1600, 4, BlockMajor),
        (7000, 1, BlockMajor),
    ):
        blocks = torch.zeros(1, 1, 16, dtype=torch.int32).expand(tokens, heads, 16)
        launch = choose_launch(q.expand(tokens, 16, 128), case.pages, blocks, case.batch)
        assert isinstance(launch, way)
    assert isinstance(choose_launch(q.float(), case.pages, blocks, case.batch), QueryMajor)


class FakeStream:
    """What is known to be done before the stream's next work."""

    def __init__(self) -> None:
        self.done: set[tuple[str, int]] = set()

    def record_event(self) -> frozenset[tuple[str, int]]:
        return frozenset(self.done)

    def wait_event(self, event: frozenset[tuple[str, int]]) -> None:
        self.done |= event

    def wait_stream(self, other: "FakeStream") -> None:
        self.done |= other.done


@pytest.mark.parametrize("num_passes", [1, 2, 5])
def test_passes_wait_for_each_other(monkeypatch, num_passes):
    main, side = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(block_kernel, "_attending_stream", lambda _: side)
    main.done.add(("lists", 0))
    with block_kernel._Turns(torch.device("cuda"), num_passes) as turns:
        main.done.add(("attend", 0))
        for index in range(num_passes):
            if index + 1 < num_passes:
                with turns.attending(index + 1):
                    assert ("lists", 0) in side.done
                    # Of the scratch's two users, the earlier has been combined.
                    assert index == 0 or ("combine", index - 1) in side.done
                    side.done.add(("attend", index + 1))
            with turns.combining(index):
                assert ("attend", index) in main.done
                assert ("attend", index + 1) not in main.done
                main.done.add(("combine", index))
    assert side.done <= main.done
    assert len(main.done) == 1 + 2 * num_passes


def test_widened_pages_hold_the_same_keys(paged, kernel_device):
    case = paged([1, 7, 30, 2], [9, 40, 33, 16], page_size=8, dtype=torch.float16)
    placed = case.to(kernel_device)
    pages, batch = widen_pages(placed.pages, placed.batch, torch.float32)
    # Twice the elements, of half the bytes.
    assert wide_bytes(placed.pages, placed.batch) == pages.k_pages.nbytes
    for request in (1, 2, 3):
        count = -(-case.seq_lens[request] // 8)
        before = case.batch.page_table_RN[request, :count].long()
        after = batch.page_table_RN[request, :count].long().cpu()
        assert torch.equal(
            batch.page_table_RN[request].cpu() < 0, case.batch.page_table_RN[request] < 0
        )
        for old, new in ((case.pages.k_pages, pages.k_pages), (case.pages.v_pages, pages.v_pages)):
            keys, wide = (
                part.transpose(1, 2).flatten(0, 1)[: case.seq_lens[request]]
                for part in (old[before], new.cpu()[after])
            )
            assert torch.equal(keys.float(), wide)
        tail = pages.v_pages.cpu()[after].transpose(1, 2).flatten(0, 1)[case.seq_lens[request] :]
        assert not tail.any()


def distinct_blocks(own_T: torch.Tensor, heads: int, topk: int) -> torch.Tensor:
    """[T, heads, topk] random distinct blocks up to each token's own one, which is among them."""
    generator = torch.Generator().manual_seed(5)
    score = torch.rand(len(own_T), heads, int(own_T.max()) + 1, generator=generator)
    block = torch.arange(score.shape[-1])
    own = own_T[:, None, None]
    score = torch.where(block > own, -1.0, torch.where(block == own, 2.0, score))
    value, chosen = score.topk(min(topk, score.shape[-1]), -1)
    chosen = torch.where(value < 0, 1 << 30, chosen).sort(-1).values
    chosen = torch.where(chosen == 1 << 30, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1).int()


@pytest.mark.parametrize("pages_type", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_kv_heads", "heads"),
    [
        ([700, 333], [700, 5000], 4, 64),
        ([1, 260], [300, 140_000], 4, 64),
        ([513], [2000], 1, 16),
        ([600], [601], 1, 8),
        ([33], [9000], 4, 64),
        ([1, 1, 900, 500], [9, 300, 900, 140_000], 4, 64),
    ],
)
def test_m3_shapes(paged, cuda, query_lens, seq_lens, num_kv_heads, heads, pages_type):
    case = paged(
        query_lens,
        seq_lens,
        page_size=128,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
    )
    for name in ("k_pages", "v_pages"):
        setattr(case.pages, name, getattr(case.pages, name).to(pages_type))
    blocks = distinct_blocks(case.batch.positions_T // 128, num_kv_heads, 16)
    launches = [None, QueryMajor(), QueryMajor(split=4), BlockMajor(), BlockMajor(slab=256)]
    q = case.randn(1, heads, 128).to(cuda)
    if block_hopper_kernel.serves(q, case.to(cuda).pages, case.batch):
        launches += [launch._replace(on_hopper=True, heads=4) for launch in launches[3:]]
        launches.append(BlockMajor(on_hopper=True, unit=8))
    for launch in launches:
        assert_like_reference(
            case, cuda, heads, blocks, launch, tolerance=1e-2, dtype=torch.bfloat16
        )


@pytest.mark.parametrize("on_hopper", [False, True])
def test_runs_agree_to_the_bit(paged, cuda, on_hopper):
    case = paged(
        [900], [4000], page_size=128, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16
    ).to(cuda)
    blocks = distinct_blocks(case.batch.positions_T.cpu() // 128, 4, 16).to(cuda)
    q = case.randn(900, 64, 128).to(cuda)
    if on_hopper and not block_hopper_kernel.serves(q, case.pages, case.batch):
        pytest.skip("needs a Hopper GPU")
    launch = BlockMajor(slab=512, on_hopper=on_hopper)
    runs = []
    for _ in range(3):
        out = torch.empty_like(q)
        msa_attention_prefill(q, case.pages, blocks, case.batch, 0.1, out, launch)
        runs.append(out)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
