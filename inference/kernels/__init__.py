"""Ops of the M3 forward pass, one folder each: `from inference.kernels.<op> import <op>`.

The public function checks its arguments and runs `reference.py` on the CPU; on a device without a
kernel it raises instead of falling back. Importing this package loads no op.
"""
