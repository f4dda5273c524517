"""Files, paths and text from outside: limits, and one message for each mistake."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.reading.files import read_bytes, read_text
from param_decomp_lab.reading.json_text import MAX_DEPTH, parse_json, read_json, read_json_object
from param_decomp_lab.reading.paths import file_within, user_path
from param_decomp_lab.reading.printable import one_line, printable, shortened
from param_decomp_lab.reading.yaml_text import MAX_VALUES, parse_yaml, read_mapping

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2 * MAX_DEPTH))

BAD_YAML = {
    "bomb": (BOMB, "line 5: not accepted: more than 20,000 values"),
    "merge keys": (MERGES, "line 9: not accepted: more than 20,000 values"),
    "itself": ("a: &a [1, [*a]]", "line 1: not accepted: an alias for what it is a part of"),
    "deep aliases": (CHAIN, f"nested deeper than {MAX_DEPTH} levels, by aliases"),
    "brackets": ("[" * 100_000, f"line 1: not accepted: nested deeper than {MAX_DEPTH} levels"),
    "braces": ("{a: " * 100_000, f"line 1: not accepted: nested deeper than {MAX_DEPTH} levels"),
    "dashes": ("- " * 100_000, f"line 1: not accepted: nested deeper than {MAX_DEPTH} levels"),
    "bool": ("a: 1\nb: !!bool abc", "line 2: not accepted: 'abc' is no bool"),
    "timestamp": ("a: !!timestamp abc", "line 1: not accepted: 'abc' is no timestamp"),
    "date": ("a: 2020-13-45", "line 1: not accepted: '2020-13-45' is no timestamp"),
    "int": ("a: !!int abc", "line 1: not accepted: 'abc' is no int"),
    "no digits": ("a: !!int ''", "line 1: not accepted: '' is no int"),
    "float": ("a: !!float abc", "line 1: not accepted: 'abc' is no float"),
    "large": ("a: 1" + "0" * 2000, "line 1: not accepted: a number of 2001 digits"),
    "digits": ("a: 1" + "0" * 100_000, "line 1: "),
    "exponents": ("a: " + "1" * 200_000 + "e", ""),  # took minutes: the expression for floats went back at each digit
    "surrogate": ('a: "\\ud800"', "line 1: not accepted: half of a surrogate pair"),
    "key twice": ("k: 1\n? " + "k\n", "line 2: the key 'k' is given twice"),
    "list as a key": ("? [1]\n: 2", "unhashable"),
    "control character": ("a: \x1b[31m", "not valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [pytest.param(*case, id=name) for name, case in BAD_YAML.items()])
def test_yaml(text: str, says: str) -> None:
    if not says:
        assert isinstance(parse_yaml(text, "file")["a"], str)
        return
    with pytest.raises(UserError) as error:
        parse_yaml(text, "file")
    assert says in str(error.value)
    assert str(error.value).startswith("file")
    assert len(str(error.value)) < 1000


def test_yaml_takes_aliases_and_merge_keys() -> None:
    text = "base: &base {a: 1, b: [1.5e-5, 2]}\nown: {<<: *base, a: 2}\nagain: [*base, *base]"
    base = {"a": 1, "b": [1.5e-5, 2]}
    assert parse_yaml(text, "file") == {"base": base, "own": {**base, "a": 2}, "again": [base, base]}


def test_yaml_counts_nodes() -> None:
    assert len(parse_yaml(f"[{'x,' * 1000}]", "file")) == 1000
    with pytest.raises(UserError, match="more than 20,000 values"):
        parse_yaml(f"a: &a [{'x,' * (MAX_VALUES // 100)}]\nb: [{'*a,' * 100}]", "file")


BAD_JSON = {
    "brackets": ("[" * 100_000, "nested deeper than"),
    "closed brackets": ('{"a":' + "[" * 500 + "]" * 500 + "}", "nested deeper than 64 levels"),
    "objects": ('{"a":' * 500 + "1" + "}" * 500, "nested deeper than 64 levels"),
    "cut off": ('{"a": ', "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "NaN": ('{"a": NaN}', "NaN is not a finite number"),
    "infinity": ('{"a": -Infinity}', "-Infinity is not a finite number"),
    "exponent": ('{"a": 1e400}', "1e400 is not a finite number"),
    "integer": ('{"a": 1' + "0" * 400 + "}", "a number of 401 digits"),
    "digits": ('{"a": ' + "9" * 100_000 + "}", "a number of 100000 digits"),
    "surrogate": ('{"a": "\\ud800"}', "half of a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [pytest.param(*case, id=name) for name, case in BAD_JSON.items()])
def test_json(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        parse_json(text, "file")
    assert str(error.value).startswith("file")
    assert says in str(error.value)


def test_json_that_is_fine() -> None:
    text = '{"a": [1, -2.5e-3, 18446744073709551615, "\\ud83d\\ude00"], "b": {"c": null}}'
    assert parse_json(text, "file") == {"a": [1, -0.0025, 2**64 - 1, "😀"], "b": {"c": None}}
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "file")
    assert parse_json(f"[{'[],' * 1000}1]", "file")[-1] == 1


def pipe(path: Path) -> None:
    os.mkfifo(path)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "pipe": (pipe, "it is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "folder": (Path.mkdir, "it is a folder"),
    "large": (lambda path: path.write_text("a" * 1001), "more than 1,000 bytes"),
    "endless": (lambda path: path.touch() or os.truncate(path, 1 << 40), "more than 1,000 bytes"),
    "binary": (lambda path: path.write_bytes(b"ab\xff"), "not UTF-8 text (invalid start byte at byte 2)"),
    "link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_file(tmp_path: Path, kind: str) -> None:
    make, says = BAD_FILES[kind]
    path = tmp_path / "file"
    make(path)
    with pytest.raises(UserError) as error:
        read_text(path, "the thing", 1000)
    assert str(error.value).startswith(f"{path}: cannot read the thing: ")
    assert says in str(error.value)


def test_files_are_read_whole_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xc3\xa4\r\nb")
    assert read_text(tmp_path / "file", "the thing", 5) == "ä\nb"
    assert read_bytes(tmp_path / "file", "the thing", 5) == b"\xc3\xa4\r\nb"
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "a.json", "the thing") == {"a": 1}
    assert read_mapping(tmp_path / "a.json", "the thing") == {"a": 1}
    (tmp_path / "list.json").write_text("[null]")
    assert read_json(tmp_path / "list.json", "the thing") == [None]
    with pytest.raises(UserError, match="the thing should be a JSON object; this file holds a list"):
        read_json_object(tmp_path / "list.json", "the thing")
    with pytest.raises(UserError, match="more than 3 bytes"):
        read_json(tmp_path / "list.json", "the thing", 3)


BAD_PATHS = {
    "null": ("a\0b", "'a\\x00b': a path cannot have a zero byte"),
    "user": ("~nobody-of-this-name/x", "could not determine home directory"),
    "name": ("runs/" + "ä" * 128, "a name in it has 256 bytes; file systems take 255"),
    "whole": ("a/" * 2100, "has 4199 bytes"),
}


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_path(kind: str) -> None:
    text, says = BAD_PATHS[kind]
    with pytest.raises(UserError) as error:
        user_path(text)
    assert says in str(error.value)


def test_path_that_is_fine() -> None:
    assert user_path("~/a/../b") == Path.home() / "a/../b"
    assert user_path("x" * 255) == Path("x" * 255)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", 5, None, "a\0", "x" * 256, "pipe"])
def test_name_outside(tmp_path: Path, name: object) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError):
        file_within(tmp_path, name, "index")


def test_name_within(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "outside").touch()
    (tmp_path / "in" / "link").symlink_to("../outside")
    assert file_within(tmp_path / "in", "a/b..c", "index") == tmp_path / "in/a/b..c"
    assert file_within(tmp_path / "in", "link", "index", links=True) == tmp_path / "in/link"
    with pytest.raises(UserError, match="a link that leads out of"):
        file_within(tmp_path / "in", "link", "index")


def test_printable() -> None:
    assert printable("a\x1b[31mb\r\x9b\u202e\ud800\x00\nä✓") == "a\\x1b[31mb\\r\\x9b\\u202e\\ud800\\x00\nä✓"
    assert printable(os.fsdecode(b"a\xff")) == "a\\xff"
    assert one_line("a\nb\t") == "a\\nb\\t"
    assert shortened("x" * 1000, 10) == "xxxxxxxx … (990 characters left out) … xx"
    assert shortened("x" * 10, 10) == "x" * 10
