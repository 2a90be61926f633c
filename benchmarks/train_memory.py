"""python -m benchmarks.train_memory [--cpu]

The planner's bytes of a trainer GPU (`m3rl/plan_trainer.py`) beside what torch allocated at most in
real optimizer steps of the slice of M3 that `train_step` times. `--cpu` runs a small slice and
holds what the planner says of masters, moments and gradients against the tensors' bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernels.harness import Bench
from benchmarks.record import RESULTS, write_record
from benchmarks.train_measure import GB, free_memory, make_deterministic_products, model_config
from benchmarks.train_step import Ours, Samples, Slice
from m3rl.plan_lora import plan_rank
from m3rl.plan_trainer import TrainerSetting

BENCH = "train_memory"
TOLERANCE = 0.05
"""Of planned to measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    lengths: tuple[int, ...]
    micro_batch_tokens: int
    checkpointing: bool = True

    @property
    def num_micro_batches(self) -> int:
        return -(-sum(self.lengths) // self.micro_batch_tokens)


CASES = {
    "two micro-batches of 8K": Case((8192, 8192), 8192),
    "four micro-batches of 2K": Case((2048,) * 4, 2048),
    "one of 8K, all activations kept": Case((8192,), 8192, checkpointing=False),
    "one of 8K": Case((8192,), 8192),
    "one of 64K": Case((32768, 16384, 8192, 4096, 2048, 1024, 512, 512), 65536),
}
SMALL_CASES = {
    "two micro-batches": Case((48, 48), 48),
    "one, all activations kept": Case((48,), 48, checkpointing=False),
}


def measure(trainer: Ours, slice_: Slice, case: Case) -> int:
    """Bytes: on a GPU the most that were allocated during a step, else those of masters, moments
    and gradients."""
    batch = Samples.of(case.lengths, slice_.vocab_size)
    rank = trainer.rank
    rank.settings = dataclasses.replace(
        rank.settings,
        micro_batch_tokens=case.micro_batch_tokens,
        activation_checkpointing=case.checkpointing,
    )
    rank.policy.activation_checkpointing = case.checkpointing
    args = batch.ids_BS, np.array(batch.lengths), batch.mask_BS
    trainer.step(*args)  # compiles; moments exist from here on
    if slice_.device.type == "cpu":
        policy = rank.policy
        held = [*policy.parameters(), *policy.buffers(), *rank._optimizer.tensors().values()]
        # The step has freed its gradients, one for each trained weight.
        held += [weight for weight in policy.parameters() if weight.requires_grad]
        return sum(tensor.nbytes for tensor in held)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(*args)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run_case(trainer: Ours, slice_: Slice, name: str, case: Case, results: Path) -> None:
    measured = measure(trainer, slice_, case)
    setting = TrainerSetting(
        model_config(slice_.raw),
        slice_.dtype,
        slice_.device.type,
        micro_batch_tokens=case.micro_batch_tokens,
        num_micro_batches=case.num_micro_batches,
        checkpointing=case.checkpointing,
        compares=False,
    )
    plan = plan_rank(setting)
    planned = plan.total_bytes - plan.uses.get("CUDA, reserved", 0)  # the driver's, not torch's
    print(
        f"{name}: measured {measured / GB:.2f} GB, planned {planned / GB:.2f} "
        f"({planned / measured:.3f}x), fullest in: {plan.peak}",
        flush=True,
    )
    off = abs(planned / measured - 1)
    if off > TOLERANCE:
        raise AssertionError(f"the plan is off by {off:.1%}, more than {TOLERANCE:.0%}")
    write_record(
        BENCH,
        name,
        results=results,
        peak_bytes=measured,
        value={"planned_gb": planned / GB, "planned_to_measured": planned / measured},
        correct={"|planned / measured - 1|": off},
    )
    free_memory()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_memory", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a small slice, for tests")
    parser.add_argument("--seconds", type=float, default=60.0, help="most of all cases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("memory is measured on a CUDA device, and there is none")
    slice_ = Slice.tiny() if args.cpu else Slice.m3()
    make_deterministic_products()
    bench = Bench(args.seconds, args.results)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Ours(slice_, Path(folder))
        for name, case in (SMALL_CASES if args.cpu else CASES).items():
            bench.case(name, partial(run_case, trainer, slice_, name, case, args.results))
        trainer.rank.close()
    print(bench.summary(), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
