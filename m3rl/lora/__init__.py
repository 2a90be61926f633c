"""Low-rank adapters on a frozen model (LoRA, arXiv:2106.09685).

    settings.py   what is adapted
    frozen.py     how the base lies in memory: in the wire's dtype, experts in MXFP8 where wanted
    adapters.py   A and B, their gradients, and merging
    files.py      adapters as peft reads and writes them
    policy.py     the policy that trains them

Trainer and runtime compute the same function with the same values, and the runtime knows no
adapters. So a target's weight *is* the merged one, `round(base + alpha / r · B · A)` in the wire's
dtype, renewed after every optimizer step. Forward passes, syncs, hashes and exports read it where
it lies, like every other weight; only the gradient knows of A and B. It passes straight through
the rounding, as a full fine-tune's passes through that of its masters.
"""
