"""What people have written for docs/memory_study.md: the page is made anew from figures, these paragraphs stay.

A text of Markdown by the section of the page that it ends; an empty one is left out.
"""

NOTES = {
    "levers": "",
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
    "published": "",
    "ladder": "",
}
