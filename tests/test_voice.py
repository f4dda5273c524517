"""`experiments.benchmarks.voice`: what is counted on a page, and that passages can be told apart by the key alone."""

import pytest

from experiments.benchmarks import voice

PAGE = """# A page

It has a sentence. This is no good one, and there is no end:

```sh
this is no prose
```

- One item is here. Another [link](target.md) is `no` word.
- A second item

| this | is no prose |
|---|---|

## Second

{}
"""


def test_prose_alone_is_counted() -> None:
    prose = voice._prose(PAGE.format("Last words."))
    assert len(voice.NEGATIVE.findall(prose)) == 1  # neither code, nor a table, nor "there is no"
    assert list(voice._sentences(prose)) == [
        "It has a sentence.", "This is no good one, and there is no end:", "One item is here.",
        "Another [link] is `no` word.", "A second item", "Last words.",
    ]  # fmt: skip
    source = (
        '"""Of a module."""\nX = 1\n"""Of X."""\n\n\ndef f() -> str:\n    """Returns it."""\n    return "Of a string"\n'
    )
    assert sorted(voice._docstrings(source)) == ["Of X.", "Of a module.", "Returns it."]
    glossary = "| term | meaning | not |\n|---|---|---|\n| site | a matrix | hook point |\n| mask | a factor | |\n"
    (avoided,) = voice._avoided(glossary)
    assert [avoided.findall(text) for text in ("Hook points", "hook", "hook pointer")] == [["Hook points"], [], []]


def test_passages_are_told_apart_by_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (PAGE.format(f"{word} " * 70) for word in ("before", "after"))
    trees = {"c": (["README.md"], lambda _: old), None: (["README.md"], lambda _: new)}
    monkeypatch.setattr(voice, "_tree", trees.__getitem__)
    seen = set()
    for seed in range(8):
        text, key = voice.passages("c", 30, seed)
        assert (text, key) == voice.passages("c", 30, seed)
        assert f"1 of 1 passages, seed {seed}" in text
        a = text.partition("### A")[2].partition("### B")[0]
        assert ("after" in a) == (key["1"] == "A")
        seen.add(key["1"])
    assert seen == {"A", "B"}
