"""Processes for tests, forked from one that has imported what they use: 20 ms each, not 2 s."""

import multiprocessing

import torch

# CUDA does not survive a fork, and the import of kernels begins it.
PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
# The last list that is set before a process is started counts, for the whole test run.
PROCESSES.set_forkserver_preload(
    [
        "inference.engine",
        "m3rl.train_rank",
        "m3rl.weight_sync.sync",
        "tests.m3rl.weight_sync.layout_sides",
    ]
)
