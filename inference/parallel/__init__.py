"""Several ranks run one copy of the model: tensor, data and expert parallelism.

    rank = dp_rank · tp + tp_rank          world = tp · dp ranks, one worker process each

- **tp** ranks hold the same requests and split each layer: query heads with their KV and index
  heads, MLP and shared-expert width, vocabulary rows of the head. Embedding, router, norms and the
  one index key head are whole on each. Attention and MLP give a partial sum; one all-reduce over
  the tp ranks completes it. Beyond `num_key_value_heads` ranks, KV and index heads are replicated:
  such ranks hold the same pages and must select the same blocks.
- **dp** groups of tp ranks hold different requests and the same attention weights.
- **ep** groups of world / ep ranks split the routed experts; inside a group each rank holds a part
  of the width of all its experts. Groups are consecutive ranks, so none crosses a dp group:
  ep = dp · d with d | tp. What a rank holds is one rectangle of a published tensor (`shards.py`).

Experts, from a layer's tokens x_TC to y_TC on each of the tp ranks:

    dp = 1   y = (its experts, all tokens) + (its part of the shared expert); all-reduce over tp
    dp > 1   y = its part of the shared expert, while its 1/tp of the tokens travel to the ranks
             that hold their experts (`dispatch`); experts of whatever arrived; one partial sum a
             (token, rank) travels back (`combine`) and is added to y in ascending rank order, in
             FP32; all-reduce over tp

`exchange.py` has two forms of dispatch and combine. *Fixed*: all ranks show the same number of rows
(padding has expert -1) to all ranks; no count travels and the host waits for nothing, so decode
steps capture it in a CUDA graph. *Counted*: a token goes once to each rank that holds any of its
experts, after the counts went ahead and the host has read them. A rank without tokens takes part in
both. The wait for the counts takes about a millisecond, so the counted form is chosen only where it
keeps much from travelling: long prefill chunks over many ranks. At ep 2 a token reaches 94 % of the
ranks anyway.

Small collectives, those of decode steps, cost NCCL several times what their bytes do. Where the
GPUs of a group reach one another's memory (`peers.py` asks the hardware once, what came of it
`ParallelGroups.describe` tells) the all-reduces over tp, gathers and the fixed form are one launch
each that loads from the other ranks (`inference.parallel.peer_memory`). Large ones, and all others,
are NCCL's or gloo's.

Everything is deterministic: sums have a fixed order, and collectives a fixed shape.

Lockstep. Each rank drives an engine of its own. The tp ranks of a dp group are given the same
requests in the same order and so schedule alike; each part of the logits is computed on one rank
and gathered, so that all sample the same tokens. Before a step the dp groups agree, in one small
host all-reduce, on: does anybody have work; is it a decode that fits a graph everywhere; the rows
of the largest group (the graph's size, or the fixed form's rows); does anybody share pages. A group
without requests runs the step on padding. A collective is never skipped by one rank alone.

Failure. The ranks watch one another over a mesh of sockets (`watch.py`): the death of a process
closes its sockets, so all others learn it at once and name it. Hosts wait for the device, graph
replays included, and for gloo's collectives with an eye on the watch, and raise `ParallelError`
with the rank and the operation. A rank that is alive but does not come is named when the groups'
timeout is over. On the device a launch waits for a rank that is gone: later, and behind the host's
back, those in common memory are released and those of NCCL aborted, which may fail or hang. The
process is to report the error and end, by os._exit.
"""
