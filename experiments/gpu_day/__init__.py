"""A day with a GPU: one command measures what only a real card can tell, in `docs/measurements/gpu.json` and `gpu.md`.

    python -m experiments.gpu_day                              # all of it, 40 minutes on one card of 80 GB or more
    python -m experiments.gpu_day --seconds 840 --beside 0     # items 1 to 4, with a card for a quarter of an hour
    python -m experiments.gpu_day                              # again, after an interruption: the missing items
    python -m experiments.gpu_day --toy                        # the same at toy size on a CPU; some minutes
    python -m experiments.gpu_day --part step --part phases    # the missing items of these parts
    python -m experiments.gpu_day --page-only                  # the page from the JSON, without a GPU
    python -m experiments.gpu_day --plans-only                 # adds the plans of pd probe, without a GPU
    python -m experiments.gpu_day --one "V U in Δ"             # only this item; prints a line of JSON

In this order, the most valuable first:

1.  the card's own rates: a bf16 product, a copy;
2.  products: V U of Δ in fp32, split bf16 and bf16, each with its time and its error;
3.  plan, step: the layer-18 step at C 24,576 by memory policy, planned and live memory, MFU, tokens/s;
4.  phases: where the time of that step goes, and its longest kernels; a step in little more memory than its plan;
5.  other policies; toys: TMS 5-2 and ResidMLP-1, microseconds of a step; SmolLM2's step;
6.  links, if there are several cards: five kinds of collectives, their latency and rate;
7.  decompose: the MLP of a layer of SmolLM2-135M, in the time that is left, up to 30 minutes, with its report;
8.  further policies and a larger batch, if any time is left; otherwise a second call measures them;
9.  layers: attention and MLP of SmolLM2-135M's last eight layers, then the MLPs of all thirty, each for a quarter of an
    hour, with the comparison with baselines and a harvest. Alone: `--part layers --seconds 840`, once for each.

Steps 1 to 4 should take 13 of the 40 minutes on a card of more than 120 GB (each of the layer-18 steps took 90 to 110 s
on an H200, 55 to 75 s of that to compile), steps 1 to 6 some 17. The decomposition gets the rest: the measured step
time decides how many steps fit. `--seconds 600 --decompose-seconds 1800` spreads everything over calls of ten minutes.
Items that do not fit a smaller card are left out. The plans of `pd probe` need no card: they are compiled in the time
that is left, or by `--plans-only`, here or elsewhere, with the same version of JAX.

Every item runs in a process of its own (`--one ITEM`), because a process has one memory peak, and its result is in the
JSON before the next one begins. An item that was killed begins again; the decomposition resumes from its last
checkpoint. The status is 0 when everything is measured, and 75 when something is left: run the same command again.

The steps need no file: weights and tokens are drawn on the card. The decomposition needs the weights of SmolLM2. They
come from the package index or, on a machine without a network, from `--smollm2`, a folder that `pd demo --smollm2` made
elsewhere.
"""
