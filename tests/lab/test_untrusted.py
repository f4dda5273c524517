"""Files, paths and text from outside: limits, and one message for each mistake."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import read_bytes, read_text
from param_decomp_lab.safe_io.json_text import DEPTH, parse_json, read_json
from param_decomp_lab.safe_io.paths import checked_path, path_within
from param_decomp_lab.safe_io.printable import first_few, printable
from param_decomp_lab.safe_io.yaml_text import NODES, parse_yaml, read_mapping

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2 * DEPTH))

BAD_YAML = {
    "bomb": (BOMB, "line 6: more than 100,000 values"),
    "merge keys": (MERGES, "line 11: more than 100,000 values"),
    "itself": ("a: &a [1, [*a]]", "line 1: an alias refers to the value that contains it"),
    "deep aliases": (CHAIN, f"nested more than {DEPTH} levels deep, with its aliases"),
    "brackets": ("[" * 100_000, f"line 1: nested more than {DEPTH} levels"),
    "braces": ("{a: " * 100_000, f"line 1: nested more than {DEPTH} levels"),
    "dashes": ("- " * 100_000, f"line 1: nested more than {DEPTH} levels"),
    "bool": ("a: 1\nb: !!bool abc", "line 2: not valid YAML: 'abc' cannot be read as bool"),
    "timestamp": ("a: !!timestamp abc", "line 1: not valid YAML: 'abc' cannot be read as timestamp"),
    "date": ("a: 2020-13-45", "line 1: not valid YAML: '2020-13-45' cannot be read as timestamp"),
    "int": ("a: !!int abc", "line 1: not valid YAML: 'abc' cannot be read as int"),
    "no digits": ("a: !!int ''", "line 1: not valid YAML: '' cannot be read as int"),
    "float": ("a: !!float abc", "line 1: not valid YAML: 'abc' cannot be read as float"),
    "large": ("a: 1" + "0" * 400, "line 1: the number 1000"),
    "digits": ("a: 1" + "0" * 100_000, "line 1: "),
    "exponents": ("a: " + "1" * 200_000 + "e", ""),  # took minutes: the expression for floats went back at each digit
    "surrogate": ('a: "\\ud800"', "line 1: not valid text: \\ud800"),
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
    with pytest.raises(UserError, match="more than 100,000 values"):
        parse_yaml(f"a: &a [{'x,' * (NODES // 100)}]\nb: [{'*a,' * 100}]", "file")


BAD_JSON = {
    "brackets": ("[" * 100_000, "nested more than"),
    "closed brackets": ('{"a":' + "[" * 500 + "]" * 500 + "}", "nested more than 100 levels"),
    "objects": ('{"a":' * 500 + "1" + "}" * 500, "nested more than 100 levels"),
    "cut off": ('{"a": ', "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "NaN": ('{"a": NaN}', "the number NaN is not finite"),
    "infinity": ('{"a": -Infinity}', "the number -Infinity is not finite"),
    "exponent": ('{"a": 1e400}', "the number 1e400 is not finite"),
    "integer": ('{"a": 1' + "0" * 400 + "}", "the number 10000000000000000000… (401 characters) is too large"),
    "digits": ('{"a": ' + "9" * 100_000 + "}", "is too large"),
    "type": ("[]", "should be an object, not a list"),
    "null": ("null", "should be an object, not null"),
    "word": ('"x"', "should be an object, not a string"),
    "surrogate": ('{"a": "\\ud800"}', "not valid text"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [pytest.param(*case, id=name) for name, case in BAD_JSON.items()])
def test_json(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        parse_json(text, "file", dict)
    assert str(error.value).startswith("file: ")
    assert says in str(error.value)


def test_json_that_is_fine() -> None:
    text = '{"a": [1, -2.5e-3, 18446744073709551615, "\\ud83d\\ude00"], "b": {"c": null}}'
    assert parse_json(text, "file", dict) == {"a": [1, -0.0025, 2**64 - 1, "😀"], "b": {"c": None}}
    assert parse_json("[" * DEPTH + "]" * DEPTH, "file", list)
    assert parse_json(f"[{'[],' * 1000}1]", "file", list)[-1] == 1


def pipe(path: Path) -> None:
    os.mkfifo(path)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "pipe": (pipe, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "folder": (Path.mkdir, "it is a folder"),
    "large": (lambda path: path.write_text("a" * 1001), "larger than 1,000 bytes"),
    "endless": (lambda path: path.touch() or os.truncate(path, 1 << 40), "larger than 1,000 bytes"),
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
    assert read_json(tmp_path / "a.json", "the thing", dict) == {"a": 1}
    assert read_mapping(tmp_path / "a.json", "the thing") == {"a": 1}
    with pytest.raises(UserError, match="larger than 4 bytes"):
        read_mapping(tmp_path / "a.json", "the thing", 4)


BAD_PATHS = {
    "null": ("a\0b", "a\\x00b contains a null character"),
    "user": ("~nobody-of-this-name/x", "a user who is not known"),
    "name": ("runs/" + "ä" * 128, "a name of more than 255 bytes"),
    "whole": ("a/" * 2100, "longer than 4095 bytes"),
    "surrogate": ("\ud800", "is not UTF-8 text"),
}


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_path(kind: str) -> None:
    text, says = BAD_PATHS[kind]
    with pytest.raises(UserError, match=r"^--out: ") as error:
        checked_path(text, "--out")
    assert says in str(error.value)


def test_path_that_is_fine() -> None:
    assert checked_path("~/a/../b", "--out") == Path.home() / "a/../b"
    assert checked_path("x" * 255, "--out") == Path("x" * 255)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "~/x", "", 5, None, "a\0", "x" * 256])
def test_name_outside(tmp_path: Path, name: object) -> None:
    with pytest.raises(UserError, match=r"^index: "):
        path_within(tmp_path, name, "index")


def test_name_within(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("../outside")
    assert path_within(tmp_path / "in", "a/b..c", "index") == tmp_path / "in/a/b..c"
    assert path_within(tmp_path / "in", "link", "index") == tmp_path / "in/link"
    with pytest.raises(UserError, match="is a link to a file outside"):
        path_within(tmp_path / "in", "link", "index", links=False)


def test_printable() -> None:
    assert printable("a\x1b[31mb\r\x9b\u202e\ud800\x00\nä✓") == "a\\x1b[31mb\\r\\x9b\\u202e\\ud800\\x00\nä✓"
    assert printable("x" * 1000, 10) == "xxxxx … (990 more characters) … xxxxx"
    assert first_few(map(str, range(5)), 3) == ["0", "1", "2", "… and 2 more"]
    assert first_few(["\x1b"], 3) == ["\\x1b"]
