"""A day with a GPU: what only a real card can tell, by one command, as `docs/measurements/gpu.json` and `gpu.md`.

    python -m experiments.gpu_day                              # all of it, 40 minutes on one card of 80 GB or more
    python -m experiments.gpu_day --seconds 840 --beside 0     # items 1 to 4, with a card for a quarter of an hour
    python -m experiments.gpu_day                              # again, after an interruption: what is missing yet
    python -m experiments.gpu_day --toy                        # the same at toy size on a CPU; some minutes
    python -m experiments.gpu_day --part step --part phases    # of these parts what is missing
    python -m experiments.gpu_day --page-only                  # the page from the JSON, without a GPU
    python -m experiments.gpu_day --plans-only                 # adds the plans of pd probe, without a GPU
    python -m experiments.gpu_day --one "V U in Δ"             # this alone; prints a line of JSON

In this order, the most valuable first:

1.  the card's own rates: a bf16 product, a copy;
2.  products: V U of Δ in fp32, split bf16 and bf16, each with its time and its error;
3.  plan, step: the layer-18 step at C 24,576 by memory policy, planned and live memory, MFU, tokens/s;
4.  phases: where the time of that step goes, and its longest kernels; a step in memory of little more than its plan;
5.  other policies; toys: TMS 5-2 and ResidMLP-1, microseconds of a step; SmolLM2's step;
6.  links, where there are several cards: five kinds of collectives, their latency and rate;
7.  decompose: the MLP of a layer of SmolLM2-135M, for the time that is left, up to 30 minutes, with its report;
8.  further policies and a larger batch, if any time is left: else a second call has them;
9.  layers: attention and MLP of SmolLM2-135M's last eight layers, then the MLPs of all thirty, each for a quarter of an
    hour, with the comparison with baselines and a harvest. Alone: `--part layers --seconds 840`, once for each.

Steps 1 to 4 should take 13 of the 40 minutes on a card of more than 120 GB (each of the layer-18 steps took 90 to 110 s
on an H200, 55 to 75 s of that its compilation), steps 1 to 6 some 17; the decomposition gets the rest: as many steps
are planned as end in that time, from the step time measured before. `--seconds 600 --decompose-seconds 1800` spreads it
all over calls of ten minutes. What a smaller card cannot hold is left out. The plans of `pd probe` need no card: they
are compiled in the time that is left, or by `--plans-only`, here or elsewhere, with the same version of JAX.

Every item is measured in a process of its own (`--one ITEM`), since a process has one peak, and is in the JSON before
the next one begins. One that was killed is begun again, the decomposition is resumed from its last checkpoint. Status
0: everything is measured; 75: something is left, for the same command to go on with.

For the steps, weights and tokens are random, drawn on the card: no file is needed. The decomposition needs the weights
of SmolLM2, which come from the package index, or on a machine without a network from `--smollm2`, a folder that
`pd demo --smollm2` has made elsewhere.
"""
