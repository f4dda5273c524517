"""The method: pure functions on pytrees. Opens no file, reads no YAML, knows no logger and no cluster."""
