"""`pd configs convert`: rewrites a file of the original project in the current form."""

from collections.abc import Iterator
from pathlib import Path

from param_decomp_lab.config.resolve import RawConfig, load_config, read_raw
from param_decomp_lab.config.write import refuse_taken, write_config

BY = "pd configs convert"


def converted_path(source: Path, out: Path) -> Path:
    """Returns the path of the wrapper that `convert` writes. ``out``: its name, or a folder."""
    return out if out.suffix in (".yaml", ".yml") else out / f"{source.stem}.yaml"


def convert(source: Path, out: Path) -> tuple[Path, tuple[str, ...]]:
    """Writes ``source``, anything that `load_config` takes, as a wrapper and its schema file; ``out``: as in
    `converted_path`.

    Returns the wrapper and the notes on what was read. Raises UserError, which lists everything at once, if the source
    is invalid or has keys that are unsupported here, and if another file would be replaced.
    """
    target = converted_path(source, out)
    refuse_taken(target, BY)
    config = load_config(source)
    write_config(source, (), target, list(_header(read_raw(source))), BY)
    return target, config.notes


def _header(raw: RawConfig) -> Iterator[str]:
    """Yields comment lines on what was translated, what was left out, and what differs here."""
    translation = raw.translation
    if translation.is_as_it_was:
        yield f"The form was that of {translation.title}, which is read as it is."
        return
    yield f"The form was that of {translation.title}."
    if translation.origins:
        yield ""
        yield "Translated (today's key: that of the file):"
        one_each = [pair for pair in translation.origins if not pair[0].startswith("pd.decomposition_targets.")]
        yield from (f"  {ours}: {theirs}" for ours, theirs in sorted(one_each) if ours != theirs)
    if translation.no_effect:
        yield ""
        yield "Left out, for it does not matter here:"
        yield from (f"  {line}" for line in translation.no_effect)
    if translation.notes:
        yield ""
        yield "To be known:"
        yield from (f"  {line}" for line in translation.notes)
