"""One policy over many trainer ranks: FSDP2, expert parallelism, context parallelism.

    rank = row_part · ep + expert_group        expert_group holds experts [E/ep · g, E/ep · (g + 1))
    rank = share · cp + place                  place computes the place-th range of a packed row

All parameters but the experts are sharded over all ranks, experts over those of their group; so
every master, gradient and moment exists once. Ranks of one share pack the same rows.

    mesh.py      who meets whom
    exchange.py  keys for all ranks of a share; tokens to the ranks of their experts, and back
    shards.py    a model's parameters sharded, and what a rank holds of each published tensor
"""
