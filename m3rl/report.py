"""Tables for people: sample completions during a run, accuracy before and after at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from m3rl.types import Completion, Group, Prompt

SAMPLE_COLUMNS = ("prompt", "completion", "answer", "reward", "finish_reason", "num_tokens")


class Sample(NamedTuple):
    """One completion as people see it; fields in the order of SAMPLE_COLUMNS."""

    prompt: str
    completion: str
    answer: str
    reward: float
    finish_reason: str
    num_tokens: int


def choose_samples(groups: Sequence[Group], num_rows: int) -> list[Sample]:
    """The best and the worst completion of the first groups, `num_rows` in all.

    Completions without a reward come last, so that they are shown when a group has nothing else.
    """
    samples: list[Sample] = []
    for group in groups:
        ranked = sorted(
            group.completions,
            key=lambda c: (c.reward_status != "ok", -c.reward if c.reward_status == "ok" else 0.0),
        )
        ends = ranked[:1] + ranked[-1:] if len(ranked) > 1 else ranked
        samples.extend(_sample(group.prompt, completion) for completion in ends)
        if len(samples) >= num_rows:
            break
    return samples[:num_rows]


def _sample(prompt: Prompt, completion: Completion) -> Sample:
    return Sample(
        prompt=prompt.text,
        completion=completion.text,
        answer=str(prompt.payload.get("answer", "")),
        reward=completion.reward,
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.completion_ids),
    )


def sample_table(samples: Sequence[Sample], width: int = 120) -> str:
    """Sample completions as text, `width` columns wide; line ends inside are shown as \\n."""
    text_width = max(20, (width - 45) // 2)
    rows = [
        [
            _clip(sample.prompt, text_width),
            _clip(sample.completion, text_width),
            _clip(sample.answer, 16),
            f"{sample.reward:.3g}",
            sample.finish_reason,
            str(sample.num_tokens),
        ]
        for sample in samples
    ]
    header = ["prompt", "completion", "answer", "reward", "finish", "tokens"]
    return table(header, rows, right=(3, 5))


def accuracy_table(
    before: float, after: float, *, num_prompts: int, steps: int, seconds: float, run_dir: Path
) -> str:
    """What a run achieved: held-out accuracy (shares of 1) at its two ends, and where it lies."""
    rows = [
        ["before", f"{100 * before:.1f} %"],
        ["after", f"{100 * after:.1f} %"],
        ["change", f"{100 * (after - before):+.1f} points"],
    ]
    lines = [
        table(["held-out accuracy", f"{num_prompts} prompts"], rows, right=(1,)),
        f"{steps} training steps in {seconds:.0f} s",
        f"run directory: {run_dir}",
    ]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns padded to their widest cell; those numbered in `right` are set to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _clip(text: str, width: int) -> str:
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    shown = "".join(c if c.isprintable() else "·" for c in shown)
    return shown if len(shown) <= width else shown[: width - 1] + "…"
