"""Reads what others wrote: files that may be damaged, huge or hostile, and text that users type.

Everything from outside goes through here: a file of a run, a `config.json`, a recipe, an index of weights. Each
function refuses with a UserError that names the file, and holds no more than a stated amount of memory and time:

- `files`: bytes and text of a regular file of bounded size;
- `json_text`, `yaml_text`: JSON and YAML of bounded depth, size and numbers;
- `paths`: paths that a user typed, and names in files that must stay within a folder;
- `printable`: text from outside, so that it can be printed.
"""
