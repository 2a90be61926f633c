"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must be set before any test file is imported.
    os.environ["TRITON_INTERPRET"] = "1"
