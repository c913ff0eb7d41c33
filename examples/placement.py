"""What goes where, by integer programmes: `python placement.py` fills nodes, rents GPUs, places experts and layers, and
gives draft tokens to requests.

Each answer stands beside what is simpler, with the bound that nothing exceeds.
"""

import random

from programs.drafts import every_node, select
from programs.placement import greedy_experts, grouped_experts, partition, place_experts
from programs.slices import cheapest_types

from simtune import Fleet, InstanceRate, Nodes, allocate
from simtune.specs.trees import weight


def instances() -> None:
    """Prefill on one type of GPU, decode on another, within a budget."""
    fleet = Fleet((Nodes("h200", 2, 8, 3.5), Nodes("l40s", 3, 4, 1.2)), budget_per_hour=70.0)
    rates = [
        InstanceRate("prompts", "prefill", "l40s", 2, 3.1),
        InstanceRate("answers", "decode", "h200", 4, 9.5),
        InstanceRate("both", "mixed", "h200", 2, 3.4),
    ]
    answer = allocate(fleet, rates)
    print(f"instances: {answer.counts}, {answer.rate_rps:.1f} requests/s of at most {answer.lp_bound:.1f}")


def types() -> None:
    """Short prompts are cheap to serve on small GPUs, long ones do not fit them."""
    load = [[1.5, 2.2], [1.3, 3.0], [0.9, float("inf")]]
    answer = cheapest_types(load, price=[4.0, 1.2])
    alone = cheapest_types([[row[0]] for row in load], price=[4.0])
    print(f"types: {answer.gpus} for ${answer.price:.1f}/h, ${alone.price:.1f}/h with the first alone")


def experts() -> None:
    """16 experts of which few are asked for often, on two nodes of two GPUs with 5 slots each."""
    rng = random.Random(3)
    load = [rng.paretovariate(1.5) for _ in range(16)]
    best, greedy = place_experts(load, gpus=4, slots=5, time_limit_s=10), greedy_experts(load, gpus=4, slots=5)
    grouped = grouped_experts(load, nodes=2, gpus_per_node=2, slots=5, groups=4)
    print(
        f"experts: heaviest GPU {best.heaviest:.2f} (at least {best.bound:.2f}), EPLB {greedy.heaviest:.2f}, "
        f"groups on nodes of their own {grouped.heaviest:.2f}"
    )


def layers() -> None:
    """A pipeline over two kinds of GPU, of which one is twice as fast and has three times the memory."""
    cut = partition([1e-3] * 32, [0.5e9] * 32, [2.0, 1.0, 1.0], [24e9, 8e9, 8e9], send_s=1e-4)
    spans = [f"{stage.first}-{stage.last} on {stage.device}" for stage in cut.stages]
    print(f"layers: {', '.join(spans)}; the slowest stage takes {cut.slowest_s * 1e3:.1f} ms")


def drafts() -> None:
    """Six draft tokens for two requests, of which the second asks for 0.9 accepted tokens at least."""
    ranks = [((0.7, 0.2), (0.6, 0.2)), ((0.4, 0.3), (0.5, 0.1))]
    trees = [every_node(of_one) for of_one in ranks]
    chosen = select(trees, budget=6, minima=[0.0, 0.9])
    gains = [sum(weight(node, of_one) for node in tree) for tree, of_one in zip(chosen, ranks, strict=True)]
    print(f"drafts: {[len(tree) for tree in chosen]} tokens, {gains[0]:.2f} and {gains[1]:.2f} of them accepted")


if __name__ == "__main__":
    for answer in (instances, types, experts, layers, drafts):
        answer()
