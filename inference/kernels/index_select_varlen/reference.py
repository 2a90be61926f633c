"""MSA's choice of key blocks for packed samples: all scores at once, then the common rule."""

import torch
from torch import Tensor

from inference.kernels.index_select.reference import choose_blocks
from inference.kernels.packed_queries import padded_samples
from inference.kernels.packing import Packing


def index_select_varlen(
    index_q_QKD: Tensor,
    index_k_TD: Tensor,
    packing: Packing,
    block_size: int,
    topk_blocks: int,
    local_blocks: int,
) -> Tensor:
    samples = padded_samples(packing)
    num_keys = samples.key_RS.shape[1]
    q_RXKD = samples.queries(index_q_QKD).float()
    k_RSD = samples.keys(index_k_TD).float()
    scores_RXKS = (q_RXKD.flatten(1, 2) @ k_RSD.mT).unflatten(1, q_RXKD.shape[1:3])
    scores_RXKS = torch.where(samples.is_past_RXS[:, :, None], scores_RXKS, -torch.inf)
    scores_RXKS = torch.nn.functional.pad(
        scores_RXKS, (0, -num_keys % block_size), value=-torch.inf
    )
    scores_RXKN = scores_RXKS.unflatten(-1, (-1, block_size)).amax(-1)
    num_blocks_RX1 = (samples.position_RX // block_size + 1)[..., None]
    return samples.packed(choose_blocks(scores_RXKN, num_blocks_RX1, topk_blocks, local_blocks))
