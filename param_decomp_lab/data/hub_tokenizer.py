"""Finds tokenizers by the names of their models on the Hugging Face hub."""

from pathlib import Path

from param_decomp_lab.data.hub_text import explained
from param_decomp_lab.data.tokenizers import BYTES, TOKENIZER_CONFIG, TOKENIZER_FILE
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.answers import ask_for_file
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.quiet_hub import quiet_hub


def cached_tokenizer(name: str) -> str | None:
    """Returns `bytes`, a file or folder, or the file in the hub's local cache; None for a tokenizer that must be
    fetched.
    """
    if name == BYTES or Path(name).expanduser().exists():
        return name if name == BYTES else str(Path(name).expanduser())
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, TOKENIZER_FILE)
    except HFValidationError as error:
        raise UserError(
            f"no tokenizer at {printable(name, 200)}: give `bytes`, a {TOKENIZER_FILE}, a local folder that holds one, "
            "or the name of a model on the Hugging Face hub (organisation/name)"
        ) from error
    return found if isinstance(found, str) else None


def fetch_tokenizer(name: str) -> str:
    """Like `cached_tokenizer`, but fetches what is missing. Raises UserError for what the hub refuses or does not have,
    and CannotFetch if the hub cannot be reached.
    """
    found = cached_tokenizer(name)
    if found is not None:
        return found
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    what = f"the tokenizer {printable(name, 200)} (no file or folder here, and not in the local Hugging Face cache)"
    with explained(what, f"models/{name}"), quiet_hub():
        try:
            ask_for_file(name, TOKENIZER_FILE)
            file = hf_hub_download(name, TOKENIZER_FILE)
        except LocalEntryNotFoundError:  # no network
            raise
        except EntryNotFoundError as error:
            raise UserError(
                f"{printable(name, 200)} has no {TOKENIZER_FILE} on the hub; give a file or folder that holds one"
            ) from error
        try:
            hf_hub_download(name, TOKENIZER_CONFIG)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            pass  # does not name the end-of-document token
    return str(file)
