"""Faults for `fuzz.py`: done to bytes, to trees of JSON and YAML, to their texts, and to a file's place in its folder.

Every function takes a ``random.Random``, from which alone its choices come, and says in words what it did.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

SECRET = "what lies outside of the folder: 5d1c7e0b"
"""The content of the files beside a case's own; it is to come into no output and into no file."""
HUGE = 3 << 30
"""Bytes of a sparse file: more than a case may take."""
RAW = "@@raw@@"
"""Stands in a tree where `RAW_VALUES` belong, which no writer writes."""
RAW_VALUES = ("9" * 50, "1" + "0" * 400, "1" + "0" * 5000, "NaN", "Infinity", "-Infinity", "1e999", "0x10", "1_0")
EDGES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 5e-324, 1.7976931348623157e308, 1e-300, float("nan"), float("inf"),
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**8, 2 * 10**9, 4 * 10**9, 10**400, -(10**309),
    "", " ", "x", "0", "1e5", "null", "\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b2J", "\r",
    "\n\n", "[/]", "[/b]", "[bold", "[link=file:///]x[/link]", "{{ 7 * 7 }}", "<script>x</script>", "\u202e\u200b",
    "\ufeff", "\ud800", "é" * 200, "a" * 300, "a" * 100_000, "a/b", "../x", "/", "~nobody/x", "a**b", "%s{}", "*",
    [], {}, [[]], [{}], {"": None}, [None] * 1000, ["x"], {"x": 1}, [1, "x", None, True], RAW,
)  # fmt: skip
KEYS = ("", "x", "\x1b[31m", "[/]", "__class__", "../x", "a" * 300, "\u202e", "step", "0", "\x00", ".", "a.b")
INTEGERS = (0, 1, 2, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Fault:
    """``what``: in words. ``refused``: it may not be accepted. ``file``: where it is, in the case's folder. ``words``:
    the arguments, where the fault is in them."""

    what: str
    file: str
    refused: bool = False
    words: tuple[str, ...] = ()


# ---- bytes ----


def damage_bytes(content: bytes, random: Random, first: int | None = None) -> tuple[str, bytes]:
    """``first``: most faults come to lie in so many bytes, where a format keeps what it says about the others."""
    size = len(content)
    within = min(size, first) if first is not None and random.random() < 0.8 else size
    if not within:
        return "two bytes in an empty file", b"\xff\x00"
    at, data = random.randrange(within), bytearray(content)
    match random.choice(
        ("flip", "flip", "flip", "cut", "fill", "number", "number", "insert", "remove", "repeat", "add")
    ):
        case "flip":
            places = sorted(random.randrange(within) for _ in range(random.choice((1, 1, 1, 2, 8, 64))))
            for place in places:
                data[place] ^= 1 << random.randrange(8)
            return f"a bit flipped in bytes {places[:8]}", bytes(data)
        case "cut":
            length = random.choice((0, 1, 4, 7, 8, 9, at, at, size // 2, size - 8, size - 1))
            return f"cut after {max(0, length)} of {size} bytes", bytes(data[: max(0, length)])
        case "fill":
            length, value = random.choice((1, 4, 64, 4096)), random.choice((0, 255, 0x20, 0x0A, 0x5B))
            data[at : at + length] = bytes([value]) * min(length, size - at)
            return f"{length} bytes at {at} are {value}", bytes(data)
        case "number":
            width, value = random.choice((2, 4, 8)), random.choice(INTEGERS)
            at -= at % width * random.randrange(2)
            data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            return f"{width} bytes at {at} are the number {value}", bytes(data[: max(size, at + width)])
        case "insert":
            length = random.choice((1, 3, 100, 5000))
            return f"{length} bytes inserted at {at}", bytes(data[:at]) + random.randbytes(length) + bytes(data[at:])
        case "remove":
            length = random.choice((1, 2, 8, 500))
            return f"{length} bytes removed at {at}", bytes(data[:at]) + bytes(data[at + length :])
        case "repeat":
            length = random.choice((1, 16, 700))
            return f"{length} bytes at {at} twice", bytes(data[: at + length]) + bytes(data[at:])
        case _:
            length = random.choice((1, 8, 5000))
            return f"{length} bytes added", bytes(data) + random.choice((bytes(length), random.randbytes(length)))


# ---- trees ----


def damage_tree(tree: Any, random: Random) -> tuple[str, Any]:
    """A copy of a tree of dicts, lists and values with one place changed."""
    copy = json.loads(json.dumps(tree))
    places = list(_places(copy, ()))
    above, key, path = random.choice(places) if places else (None, None, ())
    where = ".".join(str(part) for part in path)[:200] or "the whole"
    if above is None or random.random() < 0.03:
        value = random.choice(EDGES)
        return f"the whole is {_shown(value)}", value
    kind = random.choice(
        ("value",) * 9 + ("remove", "remove", "wrap", "swap", "rename", "add", "double", "deep", "many")
    )
    match kind:
        case "remove":
            del above[key]
        case "wrap":
            above[key] = random.choice(([above[key]], {"x": above[key]}, [above[key]] * 3))
        case "swap":
            other, its, _ = random.choice(places)
            above[key], other[its] = other[its], above[key]
        case "rename" if isinstance(above, dict):
            above[random.choice(KEYS)] = above.pop(key)
        case "add" if isinstance(above, dict):
            above[random.choice(KEYS)] = random.choice(EDGES)
        case "double" if isinstance(above, list):
            above.extend(above[:])
        case "deep":
            for _ in range(depth := random.choice((30, 300, 900))):
                above[key] = random.choice(([above[key]], {"x": above[key]}))
            return f"{where} lies {depth} deep", copy
        case "many":
            count = random.choice((1000, 30_000))
            above[key] = {f"k{n}": n for n in range(count)} if random.random() < 0.5 else list(range(count))
            return f"{where} has {count} entries", copy
        case _:
            above[key] = value = random.choice(EDGES)
            return f"{where} is {_shown(value)}", copy
    return f"{kind} at {where}", copy


def _places(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(inside):
        yield tree, key, (*path, key)
        yield from _places(value, (*path, key))


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def as_json(tree: Any, random: Random, indent: int | None = 2) -> bytes:
    """Values from `RAW_VALUES` where the tree has `RAW`."""
    text = json.dumps(tree, indent=indent)
    while f'"{RAW}"' in text:
        text = text.replace(f'"{RAW}"', random.choice(RAW_VALUES), 1)
    return text.encode()


def damage_json(content: bytes, random: Random) -> tuple[str, bytes]:
    """A JSON text with a fault in its tree, its text or its bytes."""
    if random.random() < 0.65:
        what, tree = damage_tree(json.loads(content), random)
        return what, as_json(tree, random)
    if random.random() < 0.3:
        return damage_bytes(content, random)
    return _damage_text(content, random, _JSON_TEXTS)


def damage_json_lines(content: bytes, random: Random) -> tuple[str, bytes]:
    """JSON texts on a line each: a fault in one, or lines that are missing, repeated or in another order."""
    lines = content.splitlines()
    number = random.randrange(len(lines))
    if random.random() < 0.15:
        lines = random.choice((lines[:number], lines * 2, lines[::-1], [*lines[:number], b"", *lines[number:]]))
        return f"lines at {number} repeated, removed or turned round", b"\n".join(lines) + b"\n"
    if random.random() < 0.75:
        what, tree = damage_tree(json.loads(lines[number]), random)
        lines[number] = as_json(tree, random, None)
    else:
        what, lines[number] = damage_json(lines[number], random)
    return f"line {number + 1}: {what}", b"\n".join(lines) + b"\n"


def damage_yaml(content: bytes, random: Random) -> tuple[str, bytes]:
    """As `damage_json`."""
    if random.random() < 0.6:
        what, tree = damage_tree(yaml.safe_load(content), random)
        if " deep" in what:  # PyYAML's writer goes no deeper than Python; JSON is YAML
            return what, as_json(tree, random)
        text = yaml.safe_dump(tree, sort_keys=False)
        while RAW in text:
            text = text.replace(f"'{RAW}'", RAW, 1).replace(RAW, random.choice((*RAW_VALUES, *_YAML_VALUES)), 1)
        return what, text.encode("utf-8", "surrogatepass")
    if random.random() < 0.25:
        return damage_bytes(content, random)
    return _damage_text(content, random, _YAML_TEXTS)


_YAML_VALUES = (
    "!!bool abc", "!!timestamp abc", "!!int abc", "!!float abc", "!!binary '***'", "!!python/object/apply:os.abort []",
    "2001-02-30", "0o9", "1:99:99", "=", "<<", "&a [*a]", "*nothing", "!!set {a, b}", "!!null x", "!x y", "0b2", "~",
)  # fmt: skip


def _damage_text(content: bytes, random: Random, more: Mapping[str, Callable[[bytes], bytes]]) -> tuple[str, bytes]:
    faults = {**_TEXTS, **more}
    what = random.choice(list(faults))
    return what, faults[what](content)


def _in_the_middle(part: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) // 2] + part + content[len(content) // 2 :]


_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "a byte that is not UTF-8": _in_the_middle(b"\xff"),
    "an encoded surrogate": _in_the_middle(b"\xed\xa0\x80"),
    "a NUL": _in_the_middle(b"\0"),
    "an escape sequence": _in_the_middle(b"\x1b[31m"),
    "a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "100,000 open brackets": lambda content: b"[" * 100_000,
    "100,000 brackets": lambda content: b"[" * 100_000 + b"]" * 100_000,
    "100,000 open braces": lambda content: b'{"a":' * 100_000,
    "a line of 5 MB": lambda content: content + b" " * 5_000_000,
    "5 MB of a word": lambda content: b'"' + b"a" * 5_000_000 + b'"',
    "nothing": lambda content: b"",
    "twice": lambda content: content + b"\n" + content,
}
_JSON_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "half of it": lambda content: content[: len(content) // 2],
    "single quotes": lambda content: content.replace(b'"', b"'"),
    "a comma too many": lambda content: content.replace(b"}", b",}"),
    "200,000 numbers": lambda content: json.dumps(list(range(200_000))).encode(),
}
_YAML_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "a list of aliases, nine deep": lambda content: content + _bomb("[{}]"),
    "merged aliases, nine deep": lambda content: content + _bomb("{{<<: [{}]}}"),
    "aliases alone": lambda content: _bomb("[{}]"),
    "a list within itself": lambda content: content + b"\nx: &x [*x]\n",
    "a mapping as a key": lambda content: content + b"\n? {a: [1]}\n: 2\n",
    "another document": lambda content: content + b"\n---\nx: 1\n",
    "an unknown tag": lambda content: b"--- !!python/object/apply:os.abort []\n" + content,
    "an unknown directive": lambda content: b"%YAML 9.9\n---\n" + content,
    "tabs": lambda content: content.replace(b"  ", b"\t"),
    "10,000 deep": lambda content: content + b"\nx:\n" + b"".join(b" " * n + b"-\n" for n in range(1, 1000)),
    "30,000 keys": lambda content: content + b"\n" + b"".join(b"k%d: 1\n" % n for n in range(30_000)),
    "a key given twice": lambda content: content + b"\n" + content,
}


def _bomb(form: str) -> bytes:
    """YAML of 1 kB that stands for 10⁹ nodes."""
    lines = ["", "b0: &b0 {x: 1}"]
    lines += [f"b{n}: &b{n} {form.format(', '.join([f'*b{n - 1}'] * 10))}" for n in range(1, 10)]
    return "\n".join(lines).encode() + b"\n"


# ---- places ----


PLACES = ("removed", "a folder", "a FIFO", "a link out", "dangling", "a loop", "/", "/dev/zero", "huge")


def damage_place(path: Path, random: Random, kinds: Sequence[str] = PLACES) -> str:
    """What lies at ``path`` is no regular file any more, or one of `HUGE` bytes. The folder `outside` with `SECRET` in
    `secret.txt` is beside the folder of the case."""
    outside = next(above for above in path.parents if above.name == "work").parent / "outside"
    kind = random.choice(kinds)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif kind != "huge":
        path.unlink()
    match kind:
        case "a folder":
            path.mkdir()
        case "a FIFO":
            os.mkfifo(path)
        case "a link out":
            path.symlink_to(outside / "secret.txt")
        case "dangling":
            path.symlink_to("nothing")
        case "a loop":
            path.symlink_to(path.name)
        case "/dev/zero" | "/":
            path.symlink_to(kind)
        case "huge":
            with path.open("ab") as file:
                file.truncate(HUGE)
        case _:
            pass
    return f"{path.name}: {kind}"
