"""Settings of how new weights reach the replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from m3rl.config_file import Bool, Float, Int, Seconds, Section, at_most


class ProbeConfig(Section):
    every: Int = Field(default=0, ge=0)
    """Probe the replicas at every so many policy versions (1: at all of them), before they serve:
    trainer and runtime compute the log-probabilities of the same prompts; 0: never. The hash shows
    that both hold the same bits, the probe that they compute the same function with them."""
    prompts: Annotated[Int, at_most(1024, "a replica serves nobody while it probes")] = Field(
        default=2, ge=1
    )
    """Prompts of a probe, made of the first ones in data.train. Every other one is longer than what
    block selection keeps, where a replica can hold that."""
    max_error: (
        Annotated[Float, Field(gt=0), at_most(10, "models that differ so much are not the same")]
        | None
    ) = None
    """Largest mean |difference| of the log-probabilities on any prompt; null: 1e-3 for policy.dtype
    float32, 0.15 for bfloat16, 0.3 with weights or pages of the runtime in FP8."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"
    """What carries the weights: ipc by copy engines between GPUs of one host, also within one GPU;
    nccl between GPUs, one for each rank; gloo through the memory of hosts; auto: the first of them
    that connects all trainer ranks and replicas. Where ipc is refused only when they connect
    (another container, no peer access), auto logs why and takes the next."""
    pause: Literal["keep", "drain", "recompute"] = "keep"
    """What a replica does with running requests when it changes weights: keep their pages, which
    the old ones computed, and go on; drain, finish them first; or recompute their pages."""
    chunk_mib: Annotated[Int, at_most(8192, "it is staged twice, beside the weights")] = Field(
        default=256, ge=1
    )
    """MiB that a trainer rank or a worker stages at a time, twice, of weights that cannot travel
    straight from or to their places."""
    wire: Literal["bf16", "mxfp8"] = "bf16"
    """How weights travel that replicas hold in MXFP8; mxfp8: quantised by the trainer, to the same
    bytes, half as many."""
    delta: Bool = False
    """Send only what changed, as replicas store it, to those that hold the version sent before; a
    trainer rank remembers what it sent (2 bytes a weight, 1.03 in MXFP8). Not where more than a
    quarter of the bytes would travel. For slow links: some 3 % of the bytes at lr 1e-6."""
    delta_full_every: Int = Field(default=20, ge=2)
    """With delta, of so many syncs one sends all."""
    timeout_s: Annotated[Seconds, Field(ge=1)] = 60.0
    """Longest wait in any phase of a sync; then the slow side is named and poisoned."""
    verify: Bool = True
    """Compare the hashes of trainer and replica before the new version serves."""
    min_replicas: Int = Field(default=1, ge=1)
    """Replicas that must succeed in a sync for the run to go on."""
    probe: ProbeConfig = ProbeConfig()
