"""Trains a byte-pair tokenizer on the text to tokenize."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from param_decomp_lab.data.tokenizers import LARGEST_ID, TOKENIZER_CONFIG, TOKENIZER_FILE
from param_decomp_lab.errors import UserError

TEXT_BOUNDARY = "<|endoftext|>"
"""The token that is both BOS and EOS, as in GPT-2."""
FEWEST_TOKENS = 257
"""The smallest vocabulary: `TEXT_BOUNDARY` and the bytes."""
TRAINED_ON = 1 << 27
"""The number of characters to train on: more text hardly changes the merges."""


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Writes ``folder/tokenizer.json`` and ``folder/tokenizer_config.json``: a byte-level byte-pair tokenizer (BPE) of
    ``vocab_size`` tokens, or of fewer if ``texts`` have no more pairs to merge. `TEXT_BOUNDARY` has the id 0, and the
    tokenizer puts it before every text. Equal texts give equal files. Only the first `TRAINED_ON` characters are read.
    Raises UserError for a size out of range, and what iterating over ``texts`` raises.
    """
    if not FEWEST_TOKENS <= vocab_size <= LARGEST_ID + 1:
        raise UserError(
            f"--bpe should be between {FEWEST_TOKENS} (the 256 bytes and {TEXT_BOUNDARY}) and {LARGEST_ID + 1:,} "
            f"tokens; it is {vocab_size:,}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TEXT_BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts, TRAINED_ON), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TEXT_BOUNDARY} $A", special_tokens=[(TEXT_BOUNDARY, tokenizer.token_to_id(TEXT_BOUNDARY))]
    )
    roles = dict.fromkeys(("bos_token", "eos_token"), TEXT_BOUNDARY)
    # With this class, transformers uses tokenizer.json unchanged; see weights/gguf_tokenizer.py.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _beginning(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yields the first of ``texts``, until they have this many characters."""
    read = 0
    for text in texts:
        if read >= characters:
            return
        yield text
        read += len(text)
