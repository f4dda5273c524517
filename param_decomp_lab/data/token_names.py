"""Names of token ids, the same in harvests, the browser, graphs, prompts for labels, and shared files.

No two ids of a tokenizer have one name, and a name depends on the tokenizer alone, not on which ids are shown. Names
hold nothing that `safe_io.printable` would escape.
"""

import re
from collections.abc import Mapping, Sequence, Set

from param_decomp_lab.safe_io.printable import UNPRINTABLE, shortened

NAME_CHARACTERS = 100
"""Longest name, but for an id appended to it."""
END_CHARACTERS = 30
"""Characters that are shown of each end of a longer token."""
STORED_CHARACTERS = NAME_CHARACTERS + 20
"""Longest name in a file, with what is appended."""

Piece = str | bytes
"""What an id stands for: text, or bytes, which need not be whole characters."""

PICTURES = {**{chr(code): chr(0x2400 + code) for code in range(32)}, "\n": "↵", "\x7f": "␡"}
"""Line breaks show as ↵, other control characters as their Unicode pictures (a zero byte is ␀)."""
# Spaces that look like the plain one, and characters that do not show.
_UNSEEN = re.compile(
    f"[\n{UNPRINTABLE}\u00a0\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200a\u202f\u205f"
    "\u206a-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
BYTE_PIECES = {f"<0x{byte:02{case}}>": byte for byte in range(256) for case in "Xx"}
"""Bytes in a vocabulary of text that falls back to bytes."""
_SHOWN_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER_BYTES = sorted(set(range(256)) - set(_SHOWN_BYTES))
_BYTE_OF = {chr(byte): byte for byte in _SHOWN_BYTES} | {chr(256 + n): byte for n, byte in enumerate(_OTHER_BYTES)}
"""The bytes that characters stand for in a byte-level vocabulary, GPT-2's."""
LOST = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts in place of bytes that form no character."""
_NUMBER = re.compile(r"\[(0|[1-9][0-9]*)\]")


def unnamed(token: int) -> str:
    """`[300]`: the name of an id that the tokenizer does not have, and of every id without a tokenizer."""
    return f"[{token}]"


def visible(text: str) -> str:
    """``text`` with control characters as pictures, and other characters that do not show, or look like a space, as
    `\\u00a0`. What it gives stays as it is if given again."""
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub(_shown, text)


def text_of(pieces: Mapping[int, Piece], tokens: Sequence[int]) -> str:
    """A text of these tokens, `visible`: bytes that form a character together are this character."""
    return visible(whole_text(pieces, tokens))


def whole_text(pieces: Mapping[int, Piece], tokens: Sequence[int]) -> str:
    """A text of these tokens as it is, control characters included."""
    whole = b"".join(
        piece if isinstance(piece, bytes) else piece.encode()
        for piece in (pieces.get(token) or unnamed(token) for token in tokens)
    )
    return whole.decode("utf-8", errors="backslashreplace")


def decoded_piece(piece: str, text: str, added: bool) -> Piece:
    """What an id stands for. ``piece``: as the vocabulary has it. ``text``: as it is decoded, in which bytes that form
    no character are lost. ``added``: the piece is the text as it is, and not a part of the tokenizer's model."""
    if added and LOST in text:
        return piece
    if piece in BYTE_PIECES and piece not in text:
        return bytes([BYTE_PIECES[piece]])
    if LOST in text and LOST not in piece and all(character in _BYTE_OF for character in piece):
        found = bytes(_BYTE_OF[character] for character in piece)
        return text if found == text.encode() else found
    return text or piece


def token_names(pieces: Mapping[int, Piece]) -> Mapping[int, str]:
    """The name of each id, from what it stands for; ids that stand for nothing may be left out: they are `unnamed`.

    Bytes that form no character are `\\xe6\\x97`. Bytes that are the text of another token are `\\x41`. An empty piece
    is called by its id. If several ids still have one name, the first of them keeps it, preferably one whose name is
    not just its text, and the others append their own id: `<s>[300]`.
    """
    names = {token: _name(piece) or unnamed(token) for token, piece in pieces.items()}
    as_bytes = {token: piece for token, piece in pieces.items() if isinstance(piece, bytes)}
    if as_bytes:
        texts = {name for token, name in names.items() if token not in as_bytes}
        for token, piece in as_bytes.items():
            if names[token] in texts and _is_text(piece):
                names[token] = "".join(f"\\x{byte:02x}" for byte in piece)
    literal = {token for token, name in names.items() if name == pieces[token]}
    # `[300]` is kept for 300, which has no piece.
    numbers = ((name, _NUMBER.fullmatch(name)) for name in names.values() if name[0] == "[")
    kept = {name for name, found in numbers if found is not None and int(found[1]) not in names}
    return _distinct(names, literal, kept)


def stored_names(texts: Sequence[str]) -> list[str]:
    """Names by id as a file has them, which may be another's or of an older version: fit to be shown, and distinct. If
    they were so, they stay as they are."""
    names = {token: _bounded(visible(text), STORED_CHARACTERS) or unnamed(token) for token, text in enumerate(texts)}
    found = _distinct(names)
    return [found[token] for token in names]


def _distinct(
    names: Mapping[int, str], last: Set[int] = frozenset(), kept: Set[str] = frozenset()
) -> Mapping[int, str]:
    """The same names, with the id appended to those that are ``kept`` for others or that an earlier id has; ids in
    ``last`` come after all others."""
    taken = set(names.values())
    if len(taken) == len(names) and not kept:
        return names
    found, seen = {}, set(kept)
    ids = sorted(names)
    for token in (*(i for i in ids if i not in last), *(i for i in ids if i in last)):
        name = names[token]
        if name in seen:
            name += unnamed(token)
            while name in taken:
                name += unnamed(token)
        seen.add(name)
        found[token] = name
    return found


def _name(piece: Piece) -> str:
    text = piece if isinstance(piece, str) else piece.decode("utf-8", errors="backslashreplace")
    return _bounded(visible(text), NAME_CHARACTERS)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else shortened(text, 2 * END_CHARACTERS)


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _shown(found: re.Match[str]) -> str:
    # Not `\xa0`, which is a byte.
    character, code = found[0], ord(found[0])
    return PICTURES.get(character) or (f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")
