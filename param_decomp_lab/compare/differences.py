"""Finds how the configurations of runs differ, and which runs differ only in their seeds."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from param_decomp_lab.compare.records import Record
from param_decomp_lab.config.resolve import flat_keys
from param_decomp_lab.runs.configuration import method_part

ABSENT = "–"
NOTHING = ("null", "false")
"""The usual values of a newer key that has no effect: the same as its absence."""
NAMES = ("run_id", "run_name", "out_dir", "torch_config", "experiment", "wandb_group", "wandb_tags")
"""Keys of a run's name and place."""
PLACES = ("mesh", "memory", "steps_per_dispatch", "remat_recon_forwards", "milestones")
"""Keys that do not change results: where and how they are computed."""


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns all values of a configuration, as JSON, by the keys that `--set` takes."""
    wrapper = config.get("wrapper")
    own = wrapper if isinstance(wrapper, Mapping) else {}
    method = method_part(config)
    return {
        key: text
        for part in (own, method if method is not config else {})
        for key, text in flat_keys(dict(part))
        if key.split(".")[0] not in NAMES and not key.split(".")[0].startswith("wandb")
    }


def differences(records: Sequence[Record]) -> dict[str, list[str]]:
    """Returns the keys in which runs differ, each with its value in every run, as a person would write it: `ABSENT` if
    a run lacks the key or cannot be read. Runs that cannot be read are ignored in finding the keys.
    """
    all_settings = [None if record.config is None else settings(record.config) for record in records]
    known = [own for own in all_settings if own is not None]
    keys = dict.fromkeys(key for own in known for key in own)
    return {
        key: [ABSENT if own is None else _plain(own.get(key)) for own in all_settings]
        for key in keys
        if len({own.get(key) for own in known}) > 1 and not all(own.get(key) in (None, *NOTHING) for own in known)
    }


def is_seed(key: str) -> bool:
    return key.split(".")[-1] == "seed"


def seed_groups(records: Sequence[Record]) -> list[list[int]]:
    """Returns groups of runs, by index, that differ only in seeds and in settings that do not change results. A run
    that cannot be read is in no group.
    """
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, record in enumerate(records):
        if record.config is not None:
            own = settings(record.config).items()
            same = tuple(
                (key, x) for key, x in own if not is_seed(key) and key.split(".")[0] not in PLACES and x not in NOTHING
            )
            groups.setdefault(same, []).append(number)
    return list(groups.values())


def in_order(records: Sequence[Record]) -> list[Record]:
    """Sorts runs by the values in which they differ, with seeds after all other keys; runs that cannot be read come
    last.
    """
    different = differences(records)
    keys = sorted(different, key=is_seed)

    def place(number: int) -> tuple[bool, list[tuple[bool, float, str]]]:
        return records[number].config is None, [_comparable(different[key][number]) for key in keys]

    return [records[number] for number in sorted(range(len(records)), key=place)]


def _comparable(text: str) -> tuple[bool, float, str]:
    """Returns a sort key that orders numbers by size, before texts."""
    try:
        value = float(text)
    except ValueError:
        return True, 0.0, text
    return False, value, ""


def short_names(keys: Sequence[str], records: Sequence[Record]) -> dict[str, str]:
    """Shortens each key to the fewest last words that distinguish it from the others; an entry of a list is named by
    its type.
    """
    config = next((record.config for record in records if record.config is not None), {})
    words = {key: _words(key, method_part(config)) for key in keys}
    found = {}
    for key, own in words.items():
        of_entry = len(own) > 1 and key.split(".")[-2].isdigit()
        n = 2 if of_entry else 1
        while n < len(own) and any(other[-n:] == own[-n:] for k, other in words.items() if k != key):
            n += 1
        found[key] = ".".join(own[-n:])
    return found


def _words(key: str, config: Any) -> list[str]:
    """Returns the words of a key, with the type of a list's entry instead of its index."""
    words = []
    for word in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(word)
            words.append(word)
        elif isinstance(config, list) and word.isdigit() and int(word) < len(config):
            config = config[int(word)]
            named = config if isinstance(config, Mapping) else {}
            words.append(str(named.get("name") or named.get("type") or named.get("module_pattern") or word))
        else:
            words.append(word)
    return words


def _plain(text: str | None) -> str:
    if text is None:
        return ABSENT
    value = json.loads(text)
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else text


def labels(records: Sequence[Record], most: int = 4) -> list[str]:
    """Returns the label of each run: its values if few keys differ, else its name and id, or its folder if these are
    not unique.
    """
    different = differences(records)
    different = {key: values for key, values in different.items() if key.split(".")[0] not in PLACES} or different
    names = short_names(list(different), records)
    if 0 < len(different) <= most:
        found = [
            record.id
            if record.config is None
            else ", ".join(f"{names[key]} {values[number]}" for key, values in different.items())
            for number, record in enumerate(records)
        ]
        if len(set(found)) == len(found):
            return found
    found = [" ".join(dict.fromkeys(x for x in (record.status.name, record.id) if x)) for record in records]
    return found if len(set(found)) == len(found) else [record.status.folder for record in records]
