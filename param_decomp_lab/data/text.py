"""Token ids as text to show to a person."""

from collections.abc import Sequence
from pathlib import Path

from param_decomp_lab.data.meta import META_FILE, DataMeta
from param_decomp_lab.data.tokenizers import BYTES, load_tokenizer

# Line breaks show as ↵, other control characters as their Unicode pictures (a zero byte is ␀).
PRINTABLE = str.maketrans({**{code: chr(0x2400 + code) for code in range(32)}, 10: "↵", 127: "␡"})


class TokenText:
    """Decodes the tokens of a folder that ``pd data tokenize`` wrote, or that a pretrained model keeps.

    ``folder``: holds ``tokenizer.json``, or a ``meta.json`` that says that tokens are bytes.
    Raises UserError when there is neither.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        of_bytes = (folder / META_FILE).is_file() and DataMeta.read(folder).tokenizer == BYTES
        self._tokenizer = load_tokenizer(BYTES if of_bytes else folder)
        self._known: dict[int, str] = {}

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return [int(i) for i in self._tokenizer.encode([text])[0]]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """One printable string per token id, of the same length as ``ids``; spaces stay spaces.

        A byte that is no character by itself shows as ``\\xe2``.
        """
        ids = [int(i) for i in ids]
        new = sorted(set(ids) - self._known.keys())
        self._known |= zip(new, (s.translate(PRINTABLE) for s in self._tokenizer.decode_each(new)), strict=True)
        return [self._known[i] for i in ids]
