"""The peer of `benchmarks.agreement`: logprobs of prompts by vLLM in BF16.

python -m benchmarks.vllm_logprobs FOLDER OUT      (needs vLLM importable)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main() -> int:
    from vllm import LLM, SamplingParams

    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    prompts = json.loads((folder / "prompts.json").read_text())["prompts"]
    llm = LLM(
        model=str(folder / "vllm"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=128,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        enforce_eager=True,
        enable_flashinfer_autotune=False,
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=1)
    found = {}
    for i, prompt in enumerate(prompts):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        places = output.prompt_logprobs[1:]
        chosen = [place[token].logprob for place, token in zip(places, prompt[1:], strict=True)]
        best = [next(t for t, entry in place.items() if entry.rank == 1) for place in places]
        found[f"lp{i}"] = np.array(chosen, np.float32)
        found[f"top{i}"] = np.array(best, np.int64)
    np.savez_compressed(out, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
