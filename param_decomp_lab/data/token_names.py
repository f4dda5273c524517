"""Makes the names of token ids, which are the same in harvests, the browser, graphs, prompts for labels, and shared
files.

No two ids of a tokenizer have the same name, and a name depends on the tokenizer alone, not on which ids are shown.
Names contain nothing that `safe_io.printable` would escape.
"""

import re
from collections.abc import Mapping, Sequence, Set

from param_decomp_lab.safe_io.printable import UNPRINTABLE, shortened

NAME_CHARACTERS = 100
"""Longest name, without an id appended to it."""
END_CHARACTERS = 30
"""Characters shown from each end of a longer token."""
STORED_CHARACTERS = NAME_CHARACTERS + 20
"""Longest name in a file, with an appended id."""

Piece = str | bytes
"""What an id stands for: text, or bytes, which may be parts of characters."""

PICTURES = {**{chr(code): chr(0x2400 + code) for code in range(32)}, "\n": "↵", "\x7f": "␡"}
"""How control characters are shown: line breaks as ↵, others as their Unicode pictures (a zero byte is ␀)."""
# Spaces that look like a plain one, and invisible characters.
_UNSEEN = re.compile(
    f"[\n{UNPRINTABLE}\u00a0\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200a\u202f\u205f"
    "\u206a-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
BYTE_PIECES = {f"<0x{byte:02{case}}>": byte for byte in range(256) for case in "Xx"}
"""Names of bytes in a text vocabulary with byte fallback."""
_SHOWN_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER_BYTES = sorted(set(range(256)) - set(_SHOWN_BYTES))
_BYTE_OF = {chr(byte): byte for byte in _SHOWN_BYTES} | {chr(256 + n): byte for n, byte in enumerate(_OTHER_BYTES)}
"""The bytes that characters stand for in GPT-2's byte-level vocabulary."""
LOST = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that form no character."""
_NUMBER = re.compile(r"\[(0|[1-9][0-9]*)\]")


def unnamed(token: int) -> str:
    """Returns `[300]`: the name of an id that the tokenizer lacks, and of every id without a tokenizer."""
    return f"[{token}]"


def visible(text: str) -> str:
    """Returns ``text`` with control characters as pictures, and other characters that are invisible or look like a
    space as `\\u00a0`. Applying it twice changes nothing more.
    """
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub(_shown, text)


def text_of(pieces: Mapping[int, Piece], tokens: Sequence[int]) -> str:
    """Returns the text of these tokens, made `visible`; bytes that together form a character become that character."""
    return visible(whole_text(pieces, tokens))


def whole_text(pieces: Mapping[int, Piece], tokens: Sequence[int]) -> str:
    """Returns the text of these tokens unchanged, with its control characters."""
    return whole_bytes(pieces, tokens).decode("utf-8", errors="backslashreplace")


def whole_bytes(pieces: Mapping[int, Piece], tokens: Sequence[int]) -> bytes:
    """Returns the same in UTF-8, with the bytes that form no character as they are."""
    return b"".join(
        piece if isinstance(piece, bytes) else piece.encode()
        for piece in (pieces.get(token) or unnamed(token) for token in tokens)
    )


def decoded_piece(piece: str, text: str, added: bool) -> Piece:
    """Returns what an id stands for. ``piece``: its entry in the vocabulary. ``text``: its decoded form, in which bytes
    that form no character are lost. ``added``: whether the piece is literal text rather than part of the tokenizer's
    model.
    """
    if added and LOST in text:
        return piece
    if piece in BYTE_PIECES and piece not in text:
        return bytes([BYTE_PIECES[piece]])
    if LOST in text and LOST not in piece and all(character in _BYTE_OF for character in piece):
        found = bytes(_BYTE_OF[character] for character in piece)
        return text if found == text.encode() else found
    return text or piece


def token_names(pieces: Mapping[int, Piece]) -> Mapping[int, str]:
    """Returns the name of each id, from what it stands for. Ids that stand for nothing may be left out, and are
    `unnamed`.

    Bytes that form no character are `\\xe6\\x97`. Bytes that are the text of another token are `\\x41`. An empty piece
    is named by its id. If several ids still have one name, the first of them keeps it, preferably one whose name is not
    just its text, and the others append their own id: `<s>[300]`.
    """
    names = {token: _name(piece) or unnamed(token) for token, piece in pieces.items()}
    as_bytes = {token: piece for token, piece in pieces.items() if isinstance(piece, bytes)}
    if as_bytes:
        texts = {name for token, name in names.items() if token not in as_bytes}
        for token, piece in as_bytes.items():
            if names[token] in texts and _is_text(piece):
                names[token] = "".join(f"\\x{byte:02x}" for byte in piece)
    literal = {token for token, name in names.items() if name == pieces[token]}
    # `[300]` is reserved for id 300, which has no piece.
    numbers = ((name, _NUMBER.fullmatch(name)) for name in names.values() if name[0] == "[")
    kept = {name for name, found in numbers if found is not None and int(found[1]) not in names}
    return _distinct(names, literal, kept)


def stored_names(texts: Sequence[str]) -> list[str]:
    """Makes the names by id from a file, which may come from elsewhere or from an older version, safe to show and
    distinct. Names that already are stay unchanged.
    """
    names = {token: _bounded(visible(text), STORED_CHARACTERS) or unnamed(token) for token, text in enumerate(texts)}
    found = _distinct(names)
    return [found[token] for token in names]


def _distinct(
    names: Mapping[int, str], last: Set[int] = frozenset(), kept: Set[str] = frozenset()
) -> Mapping[int, str]:
    """Returns the names, with the id appended to a name that is in ``kept`` or that an earlier id has. Ids in ``last``
    come after all others.
    """
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
