"""A run beside what its matrices can be taken apart into without training (section 17): `pd eval --baselines`."""
