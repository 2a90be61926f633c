"""A plan of another architecture than M3, as people read it."""

from __future__ import annotations

from inference.memory import size_text
from m3rl.plan_any import AnyPlan
from m3rl.report import table


def describe_any(plan: AnyPlan) -> str:
    """The plan as tables, and what a launch needs besides."""
    lines = [
        f"{plan.name}: {plan.num_ranks} trainer rank(s), {plan.num_replicas} replica(s), "
        f"a model of type {plan.model_type}",
        "",
    ]
    if plan.parameters:
        lines += [_parameter_table(plan), "", _memory_table(plan), ""]
    if plan.host_bytes:
        lines.append(f"AdamW's moments in the host's memory: {size_text(plan.host_bytes)} a rank")
    lines.append(f"tokens of a training step: at most {plan.step_tokens:,}")
    if plan.parameters:
        lines.append(
            f"weight sync: {size_text(plan.sent_bytes)} from the busiest trainer rank, "
            f"{size_text(plan.received_bytes)} to each worker of a replica"
        )
    lines += [f"note: {notice}" for notice in plan.notices]
    lines += [f"needed at launch: {what}" for what in plan.needed]
    return "\n".join(lines)


def _parameter_table(plan: AnyPlan) -> str:
    total = sum(plan.parameters.values())
    rows = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in plan.parameters.items()]
    return table(["parameters", "count", "share"], [*rows, ["all", f"{total:,}", ""]], right=(1, 2))


def _memory_table(plan: AnyPlan) -> str:
    rows = [
        [f"one {who}", what, size_text(size)]
        for who, uses in (("trainer rank", plan.trainer), ("rank of a replica", plan.replica))
        for what, size in [*uses.items(), *([("all", sum(uses.values()))] if uses else [])]
    ]
    return table(["memory", "of", "size"], rows, right=(2,))
