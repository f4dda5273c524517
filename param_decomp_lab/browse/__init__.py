"""The browser of components, `pd browse`: pages rendered here, over harvests that are only read. Nothing needs JAX but
the process that runs a text through a run (`text_worker.py`), which starts when it is first asked."""
