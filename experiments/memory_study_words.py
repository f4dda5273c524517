"""What people have written for docs/memory_study.md: the page is made anew from figures, these paragraphs stay.

A text of Markdown by the section of the page that it ends; an empty one is left out.
"""

NOTES = {
    "levers": """\
**What pays.** Layers kept instead of recomputed cost 39.7 GiB, importance logits kept instead of made lazily 33.3, no
blocks of components 15.9, unrolled layers 7.5, a KL that is not fused 6.5, donation off 6.0 (the state is 6.2), plain
attention 4.7. Each of these is on in `lean`; their prices in arithmetic are 11 %, 7 %, 2 %, and nothing.

**Beyond `lean`.** The moments of V, U on the host take off 4.0 of 14.5 GiB, more than the 2.85 that they are. That they
come back to the device only when the gradients are there had to be said to XLA (a barrier in `method/offload.py`):
without it they came back at the beginning, and the peak was the same with and without. The barrier has an effect of its own: where
it was put before the update of moments that stay on the device, the peak was 13.9 (one fp32 copy of a stack's gradient
less, and some bf16 ones). That has not been made the rule: it moves no batch that fits.
Adafactor's sums instead of Adam's moments of V, U take off 2.8, Lion's one moment or two in bf16 1.4 each: what they
are. These three are other training runs, where the host is the same one.

**Presets.** `plain` would need 396 GiB here, `published` 176, `balanced` 17.5. `lean` needs 27 × less than the
first for 1.37 × its arithmetic, and 12 × less than the second for 1.04 ×.

**What does not, here.** Making the attack's outputs again, or keeping them on the host, changes nothing at this
batch: they are not alive at the peak. Blocks of tokens inside blocks of components raise the peak, and gather every
factor again for each block: six times the bytes sent. Blocked attention needs no more memory than the fused kernel
and moves 1.4 times as much. Keeping site outputs and attention costs 2.7 GiB and saves 9 % of the arithmetic: the
best bargain of the table where there is room. A state that is replicated on each node (replica 8 × fsdp 8) is 71 GiB
more. XLA's own rematerialisation finds nothing to do: it works towards the card's size, which is far away. The second
row that each GPU has at batch 128 costs 2.2 GiB; two micro-batches take off 0.6 of them, since the gradients that they
add up have to be kept (in fp32, 2.1 GiB), and gather every factor twice. They pay where a row needs more than that.""",
    "habits": """\
An all-None specification is not the absence of one: it asks for the whole array on every device. On an array that is
whole anyway it changes nothing here, and neither do mesh axes of size 1, an `einsum` for a product or two names for one
tensor, which others have reported to cost memory: sizes and bytes moved are the same. A cast to the dtype that an array
has is dropped by JAX itself.

Donation helps by less than the size of the state: XLA puts temporaries where results will lie that are not written yet.
Of these 2.6 GiB of state it takes off 0.8 with one row of tokens on each GPU, and nothing with eight. Of a shift over a
split axis both forms need the same memory; slice and concatenate sends more.

With F1 the factors are there whole, and every GPU makes all of Δ by itself, in the forward and again in the backward.
The count of FLOPs, which is of the program before it is split, has each of these products once; of what one GPU really
does, F1 is 1.9 times F2 here. The scan over sites, in turn, pays for its memory with a product made again.""",
    "published": """\
**Where they agree.** How the layer-18 step grows from batch 32 to 64: by 1.71 on the card and 1.83 without limit
(published 1.78), with remat off by 1.80 (1.81). At batch 128 both grow less, since the card is the limit. At seq
2048 both need about the card for the 27 sites at batch 64, and both say that batch 128 does not fit. That 175.7
without limit stands beside 179.0 is no evidence: theirs is a total at the card's end, where XLA stops when it fits,
so it says little of the program. The same holds for 150.3 (batch 256).

**Where not, and why.** (1) At seq 512, batch 64, which nothing limits, ours needs 52 GiB less. The published step
holds V and U gathered whole: in bf16 27 × 49,152 × (4,096 + 14,336) × 2 B = 45.6 GiB, which do not depend on
tokens. Ours gathers a site where it is used, with every policy. (2) From batch 64 to 128 ours grows by 86 GiB
without limit and by 46 with; theirs, with, by 31. What it would grow by without is not published. (3) Layer 18,
temporaries: ours has 1.49 × as many at batch 32. 24 of these 66.4 GiB are scores of the CI function's plain
attention, `[4, 64, 2048, 2048]` in fp32 and bf16 for four blocks, which the preset `published` keeps for the
backward; with a fused kernel they are gone, and ours would be 0.95 of theirs. Whether theirs had one is not known.
20 more are five arrays of the size of a pass's logits, in fp32. (4) Remat off costs 84 GiB here without limit, 53
on the card, and 12 there. Our remat off keeps all that has a name and all between the layers; at its peak are the
scores of the frozen layers above the site too, `[8, 8, 2048, 2048, 4]` in fp32, 4 GiB for each layer. A step in
which those layers are recomputed either way, and only the masked sites are kept, moves less between the two.

The layer-18 rows were compiled in two micro-batches at first, as the configuration itself has it, and were nearer
then (55.9 beside 44.5).
No setting was chosen to make a total match.""",
    "ladder": """\
The order is the published one. Every peak is within 20 % of the published one, all but the last within 6 %. The last
(one batch of 256) is 1.19 ×: a third of it are the layers' inputs and outputs, kept once for each of 12 layers, and 6
GiB are one layer's scores in the backward, in fp32 and bf16 (`[256, 8, 512, 512]`). One fp32 copy less of these would
account for the difference. The first is the one that the card limits: XLA plans 19.5 GiB without limit and 19.6 with,
so it recomputes nothing of note by itself here, where the published run reports that it does.""",
}
