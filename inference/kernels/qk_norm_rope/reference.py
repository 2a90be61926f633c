"""The truth is the runtime's: trainer and runtime norm and rotate equally."""

from inference.kernels.qk_norm_rope_write.reference import norm_rope as qk_norm_rope

__all__ = ["qk_norm_rope"]
