"""What others can open of a run: graphs and components in the formats of other tools, and a copy of its pages."""
