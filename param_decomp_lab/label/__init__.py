"""Labels of components from a language model, and scores of labels: `pd label`. Needs no JAX."""
