"""`pd label`: has a language model label components, and scores labels. Needs no JAX."""
