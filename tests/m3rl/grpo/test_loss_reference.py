"""Every combination of the loss's switches against the papers' formulas in plain Python floats."""

import itertools
import math
import random

import pytest
import torch

from m3rl.grpo.loss import LossInputs, StepCounts, grpo_loss
from tests.m3rl.grpo.loss_cases import settings

LENGTHS = (5, 1, 3, 7, 4)
OBJECTIVES = {
    "ppo_clip": {"dual_clip": 1.6},
    "cispo": {},
    "dppo_tv": {"clip_low": 0.01, "clip_high": 0.05},
    "pg": {},
}
KLS = {
    "none": {},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "k3 unbiased": {"kl_coef": 0.3, "kl_estimator": "k3", "kl_unbiased": True},
}
COMBINATIONS = [
    (objective, ratio, aggregation, kl)
    for objective, ratio, aggregation, kl in itertools.product(
        OBJECTIVES, ("token", "sequence"), ("token_mean", "sequence_mean", "constant"), KLS
    )
    if (objective, ratio) != ("dppo_tv", "sequence")
]


def sequences(seed=0):
    """Per sequence: log π, log π_old, log μ, log π_ref, entropies, and its advantage."""
    rng = random.Random(seed)
    made = []
    for index, length in enumerate(LENGTHS):
        now = [-rng.uniform(0.2, 3) for _ in range(length)]
        moved = (0.4, -0.5, -0.5, 0.6, 0.0)[index]  # so that ratios of whole sequences are cut too
        old = [x - moved + rng.gauss(0, 0.2) for x in now]
        made.append(
            {
                "now": now,
                "old": old,
                "mu": [x + rng.gauss(0, 0.4) for x in old],
                "ref": [x + rng.gauss(0, 0.5) for x in now],
                "entropy": [rng.uniform(0, 2) for _ in now],
                "advantage": (1.3, -0.9, -0.4, -2.0, 0.7)[index],
            }
        )
    return made


def options_of(objective, ratio, aggregation, kl):
    return {
        "objective": objective,
        "ratio": ratio,
        "aggregation": aggregation,
        "constant_length": 11,
        "importance_cap": 1.5,
        "entropy_coef": 0.01,
        **OBJECTIVES[objective],
        **KLS[kl],
    }


def reference_loss(rows, o, live):
    """`live` are the log π that carry the gradient; `row["now"]` are the same, held still."""
    total = 0.0
    for row, log_pi in zip(rows, live, strict=True):
        n, adv = len(log_pi), row["advantage"]

        def ratio_at(t, log_pi, o=o, row=row, n=n):
            if o.ratio == "sequence":
                return math.exp(sum(a - b for a, b in zip(log_pi, row["old"], strict=True)) / n)
            return math.exp(log_pi[t] - row["old"][t])

        of_row = 0.0
        for t in range(n):
            r, still = ratio_at(t, log_pi), ratio_at(t, row["now"])
            if o.objective == "ppo_clip":
                gain = min(r * adv, min(max(r, 1 - o.clip_low), 1 + o.clip_high) * adv)
                if adv < 0 and o.dual_clip is not None:
                    gain = max(gain, o.dual_clip * adv)
            elif o.objective == "cispo":
                gain = min(still, 1 + o.clip_high) * adv * log_pi[t]
            elif o.objective == "dppo_tv":
                moved = math.exp(row["now"][t]) - math.exp(row["mu"][t])
                leads_out = moved > o.clip_high if adv > 0 else moved < -o.clip_low
                gain = 0.0 if leads_out else r * adv
            else:
                gain = adv * log_pi[t]
            gain *= min(math.exp(row["old"][t] - row["mu"][t]), o.importance_cap)
            term = -gain - o.entropy_coef * row["entropy"][t]
            if o.kl_coef:
                d = row["ref"][t] - log_pi[t]
                kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[o.kl_estimator]
                if o.kl_unbiased:
                    kl *= math.exp(log_pi[t] - row["old"][t])
                term += o.kl_coef * kl
            of_row += term
        total += of_row / n if o.aggregation == "sequence_mean" else of_row
    denominators = {
        "token_mean": sum(LENGTHS),
        "sequence_mean": len(LENGTHS),
        "constant": len(LENGTHS) * o.constant_length,
    }
    return total / denominators[o.aggregation]


def reference_gradient(rows, o, h=1e-6):
    grads = []
    for i, row in enumerate(rows):
        for t in range(len(row["now"])):
            sides = []
            for step in (h, -h):
                live = [list(r["now"]) for r in rows]
                live[i][t] += step
                sides.append(reference_loss(rows, o, live))
            grads.append((sides[0] - sides[1]) / (2 * h))
    return grads


def tensors_of(rows, o):
    def flat(name):
        return torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64)

    sequence = [index for index, row in enumerate(rows) for _ in row["now"]]
    return LossInputs(
        logprobs_T=flat("now").requires_grad_(),
        old_logprobs_T=flat("old"),
        behaviour_logprobs_T=flat("mu"),
        advantages_T=torch.tensor(
            [row["advantage"] for row in rows for _ in row["now"]], dtype=torch.float64
        ),
        entropy_T=flat("entropy").requires_grad_(),
        ref_logprobs_T=flat("ref") if o.kl_coef else None,
        sequence_T=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=len(rows),
    )


STEP = StepCounts(tokens=float(sum(LENGTHS)), sequences=float(len(LENGTHS)))


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_loss_and_gradient_are_those_of_the_papers(combination):
    rows, o = sequences(), settings(**options_of(*combination))
    given = tensors_of(rows, o)
    output = grpo_loss(given, o, STEP)
    live = [row["now"] for row in rows]
    assert output.loss.item() == pytest.approx(reference_loss(rows, o, live), rel=1e-12)
    (grad,) = torch.autograd.grad(output.loss, given.logprobs_T)
    # Central differences with h = 1e-6 are good to about 1e-9.
    expected = torch.tensor(reference_gradient(rows, o), dtype=torch.float64)
    torch.testing.assert_close(grad, expected, atol=1e-8, rtol=1e-6)
    parts = ("pg_loss", "kl_loss", "entropy_loss")
    told = sum(output.sums.get(f"policy/{part}", 0.0) for part in parts)
    assert output.sums["policy/loss"].item() == pytest.approx(told.item(), rel=1e-12)


def test_the_cases_reach_every_bound():
    rows = sequences()
    for objective, changes in OBJECTIVES.items():
        for ratio in ("token",) if objective == "dppo_tv" else ("token", "sequence"):
            o = settings(objective=objective, ratio=ratio, **changes)
            sums = grpo_loss(tensors_of(rows, o), o, STEP).sums
            is_cut = {side: sums[f"policy/clip_frac_{side}"] > 0 for side in ("low", "high")}
            has_low = objective in ("ppo_clip", "dppo_tv")
            assert is_cut == {"low": has_low, "high": objective != "pg"}, (objective, ratio)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_loss_gradient_and_metrics_do_not_depend_on_the_packing(combination):
    rows, o = sequences(), settings(**options_of(*combination))
    whole = tensors_of(rows, o)
    at_once = grpo_loss(whole, o, STEP)
    (expected,) = torch.autograd.grad(at_once.loss, whole.logprobs_T)
    places = torch.arange(sum(LENGTHS)).split(LENGTHS)
    outputs, grad = [], torch.zeros_like(expected)
    for packed in ([3], [2, 0], [1, 4], []):
        given = tensors_of([rows[i] for i in packed], o)
        output = grpo_loss(given, o, STEP)
        outputs.append(output)
        (part,) = torch.autograd.grad(output.loss, given.logprobs_T)
        where = torch.cat([places[i] for i in packed]) if packed else torch.zeros(0, dtype=int)
        grad[where] = part
    assert ((grad - expected).norm() / expected.norm()).item() < 1e-14
    for name, value in at_once.sums.items():
        total = sum(output.sums[name] for output in outputs)
        # A rounding a part; shares of tokens are FP32.
        atol = 8 * torch.finfo(value.dtype).eps * max(1.0, value.abs().item())
        torch.testing.assert_close(total, value, atol=atol, rtol=0)
