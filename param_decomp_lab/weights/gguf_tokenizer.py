"""Converts a GGUF's byte-level BPE tokenizer to the files of a Hugging Face tokenizer.

A GGUF has tokens, their kinds and merges, but only the name of the rule that splits text before merging. The rules are
in llama.cpp's source (`llama-vocab.cpp`); here they are rebuilt from parts of the library `tokenizers`.
"""

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from param_decomp_lab.data.tokenizers import TOKENIZER_CONFIG, TOKENIZER_FILE
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.gguf_file import GgufFile

BYTE_LEVEL_BPE = "gpt2"
LLAMA_3 = "llama-bpe"
LLAMA_3_WORDS = "|".join((
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
CUTS = ("gpt-2", "smollm", LLAMA_3)
WITHOUT = "--no-tokenizer leaves the tokenizer out"


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`: what a token is for. Others are ordinary."""

    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(file: GgufFile, folder: Path, vocab_size: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` of ``file`` into ``folder``.

    Raises UserError for another kind of tokenizer than byte-level BPE, an unknown rule for splitting text, and tokens
    that are missing, repeated or more than the ``vocab_size`` rows of the embedding.
    """
    tokenizer, roles = build_tokenizer(file, vocab_size)
    # Not `save`, which raises bare Exception when the disk is full.
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, Any] = {
        # This class uses tokenizer.json unchanged; that of a family would replace its rule for splitting text.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.count("llama.context_length"),
        **roles,
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        settings["chat_template"] = template
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def build_tokenizer(file: GgufFile, vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer, and its special tokens by role (``eos_token``). Raises as ``write_tokenizer`` does."""
    if (model := file.metadata.get("tokenizer.ggml.model")) != BYTE_LEVEL_BPE:
        raise UserError(
            f"{file.source}: its tokenizer is of the kind {model!r}; only byte-level BPE ({BYTE_LEVEL_BPE!r}) can be "
            f"imported; {WITHOUT}"
        )
    cut = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if cut not in CUTS:
        raise UserError(
            f"{file.source}: its tokenizer cuts text by the rule {cut!r}; only {', '.join(CUTS)} can be imported; "
            f"{WITHOUT}"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(tokens) > vocab_size:
        raise UserError(
            f"{file.source}: {len(tokens)} tokens, {len(ids)} of them distinct, for {vocab_size} rows of the "
            f"embedding; the file is damaged; {WITHOUT}"
        )
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in file.strings("tokenizer.ggml.merges"))]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cut == LLAMA_3))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file.source}: merges and tokens do not fit ({error}); {WITHOUT}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(cut, bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False)))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.integers("tokenizer.ggml.token_type")
    tokenizer.add_tokens([
        AddedToken(token, special=kind == TokenKind.CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    ])  # fmt: skip
    roles = _roles(file, tokens)
    # llama.cpp's defaults, if the file has no value.
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", cut == LLAMA_3) and "bos_token" in roles
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in roles
    if begins or ends:
        around = ([roles["bos_token"]] if begins else [], [roles["eos_token"]] if ends else [])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]],
            special_tokens=[(token, ids[token]) for part in around for token in part],
        )
    return tokenizer, roles


def _pre_tokenizer(cut: str, space_before: bool) -> pre_tokenizers.PreTokenizer:
    match cut:
        case "smollm":  # single digits, then as GPT-2
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=space_before)])
        case "llama-bpe":
            words = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), "isolated")
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=space_before, use_regex=False)
            return pre_tokenizers.Sequence([words, byte_level])
        case _:
            return pre_tokenizers.ByteLevel(add_prefix_space=space_before)


def _roles(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Returns the special tokens that the file names, by Hugging Face's name of their role."""
    roles = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in file.metadata:
            continue
        number = file.count(key, least=0)
        if number >= len(tokens):
            raise UserError(f"{file.source}: {key} is {number}, but there are {len(tokens)} tokens; {WITHOUT}")
        roles[f"{name}_token"] = tokens[number]
    return roles
