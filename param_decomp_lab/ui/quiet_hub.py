"""The clients of the Hugging Face hub, without what they print themselves."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_hub() -> Iterator[None]:
    """A block in which `huggingface_hub` and `datasets` log nothing, and the former shows no progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            enable_progress_bars()
