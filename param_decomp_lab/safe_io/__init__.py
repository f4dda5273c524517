"""Files, paths and text that come from outside: their size, depth and content are checked before they are used.

Anything that a person, another program or another run's folder gives us is data. Which function to use:

| what | with |
|---|---|
| a text or binary file | `files.read_text`, `files.read_bytes`: a regular file, of limited size, UTF-8 |
| a JSON file or text | `json_text.read_json`, `json_text.parse_json`: depth, finite numbers, the type |
| a YAML file or text | `yaml_text.read_mapping`, `yaml_text.parse_yaml`: the same limits, aliases counted |
| a path that a user or a file gives | `paths.checked_path` |
| a name in a file that must stay in the file's folder | `paths.path_within` |
| text to be shown, such as an error's message | `printable.printable` (for Rich: as `Text`, or escaped) |

All but the last raise UserError. This package imports nothing but `errors`, so that every other can use it.
"""
