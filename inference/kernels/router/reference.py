"""Sigmoid routing: the bias chooses, the scores weigh."""

import torch
from torch import Tensor


def router(
    x_TC: Tensor,
    weight_EC: Tensor,
    bias_E: Tensor,
    topk: int,
    scale: float,
    replay_ids_TA: Tensor | None,
) -> tuple[Tensor, Tensor]:
    # An FP32 linear under BF16 autocast returns BF16, and near ties then flip.
    with torch.autocast(device_type=x_TC.device.type, enabled=False):
        scores_TE = torch.nn.functional.linear(x_TC.to(weight_EC.dtype), weight_EC).sigmoid()
        if replay_ids_TA is None:
            ranked_TE = (scores_TE + bias_E).sort(dim=-1, descending=True, stable=True).indices
            ids_TA = ranked_TE[:, :topk]
        else:
            ids_TA = replay_ids_TA.long()
        chosen_TA = scores_TE.gather(-1, ids_TA)
        weights_TA = scale * (chosen_TA / chosen_TA.sum(-1, keepdim=True))
    return weights_TA, ids_TA.int()
