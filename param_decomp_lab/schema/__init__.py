"""What configurations are made of: models that refuse unknown keys, tables of kinds, the words of mistakes."""
