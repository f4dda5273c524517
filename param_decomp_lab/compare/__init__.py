"""`pd compare`: runs beside each other."""
