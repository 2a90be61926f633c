"""Rows added to tokens, one rank after the other."""

import torch
from torch import Tensor


def add_rows(y_SC: Tensor, rows_RC: Tensor, own_XC: Tensor, index_SW: Tensor) -> None:
    all_rows = torch.cat([rows_RC, own_XC]).float()
    sum_SC = torch.zeros(y_SC.shape, dtype=torch.float32, device=y_SC.device)
    for index_S in index_SW.T:
        is_there_S = index_S >= 0
        sum_SC[is_there_S] += all_rows[index_S[is_there_S]]
    y_SC.copy_(sum_SC + y_SC.float())
