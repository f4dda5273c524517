"""A day with a GPU: what only a real card can tell, by one command, as `docs/measurements/gpu.json` and `gpu.md`.

    python -m experiments.gpu_day                              # all of it, 40 minutes on one card of 80 GB or more
    python -m experiments.gpu_day                              # again, after an interruption: what is missing yet
    python -m experiments.gpu_day --toy                        # the same at toy size on a CPU; some minutes
    python -m experiments.gpu_day --part step --part phases    # of these parts what is missing
    python -m experiments.gpu_day --page-only                  # the page from the JSON, without a GPU
    python -m experiments.gpu_day --plans-only                 # adds the plans of pd probe, without a GPU
    python -m experiments.gpu_day --one "layer 18, lean, 8 × 512"   # this alone; prints a line of JSON

In this order, the most valuable first:

1.  the card's own rates: a bf16 product, a copy;
2.  toys: TMS 5-2 and ResidMLP-1, microseconds of a step;
3.  plan, step: the layer-18 step at C 24,576 by memory policy, planned and live memory, MFU, tokens/s; SmolLM2's step;
4.  links, where there are several cards: five kinds of collectives, their latency and rate;
5.  phases: where the time of the layer-18 step goes;
6.  decompose: the MLP of a layer of SmolLM2-135M, for the time that is left, up to 30 minutes, with its report;
7.  larger batches, other policies, if any time is left: cards of more than 80 GB have them in a second call.

Steps 1 to 5 should take some 17 of the 40 minutes (each of the layer-18 steps took 90 to 110 s on an H200, 55 to 75 s
of that its compilation); the decomposition gets the rest: as many steps are planned as end in that time, from the step
time measured before. `--seconds 600 --decompose-seconds 1800` spreads it all over calls of ten minutes. With a card for
seven minutes, `--part step --seconds 400 --beside 0` measures three policies. The plans of `pd probe` need no card:
they are compiled in the time that is left, or by `--plans-only`, here or elsewhere, with the same version of JAX.

Every item is measured in a process of its own (`--one ITEM`), since a process has one peak, and is in the JSON before
the next one begins. One that was killed is begun again, the decomposition is resumed from its last checkpoint. Status
0: everything is measured; 75: something is left, for the same command to go on with.

For the steps, weights and tokens are random, drawn on the card: no file is needed. The decomposition needs the weights
of SmolLM2, which come from the package index, or on a machine without a network from `--smollm2`, a folder that
`pd demo --smollm2` has made elsewhere.
"""
