"""The tokenizer that a GGUF file describes, as the files that transformers reads."""

import json
from pathlib import Path
from typing import Any

from h2o_mlxlm.gguf_header import Header, refuse

# The split of Llama 3's tokenizer, from its published tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises:
        ValueError: The header describes no usable tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens, kinds = header.need("tokenizer.ggml.tokens"), header.need("tokenizer.ggml.token_type")
    pre = header.need("tokenizer.ggml.pre")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(kinds):
        raise ValueError(
            f"the GGUF file's tokens must be distinct and have a type each, got {len(tokens)} tokens, "
            f"{len(vocabulary)} distinct ones, {len(kinds)} types"
        )
    # Llama 3 takes a word that is a token as it is, whatever its merges.
    bpe = models.BPE(vocabulary, _merges(header, vocabulary), ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    named = _named_tokens(header, tokens)
    if header.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = _begins_with(named, vocabulary)
    if header.get("tokenizer.ggml.add_eos_token"):
        refuse("tokenizer.ggml.add_eos_token", True, "False")
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    config["model_max_length"] = header.count("{arch}.context_length")
    if header.get("tokenizer.chat_template"):
        config["chat_template"] = header.get("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in header.need("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"the GGUF file merges {merge!r}, which its vocabulary does not hold")
        merges.append((left, right))
    return merges


def _named_tokens(header: Header, tokens: list[str]) -> dict[str, str]:
    """The tokens that have a role, by transformers' names."""
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = header.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            refuse(f"tokenizer.ggml.{key}_token_id", index, f"0 to {len(tokens) - 1}")
        named[f"{role}_token"] = tokens[index]
    return named


def _pre_tokenizer(pre: str) -> Any:
    """How text is split before merging, for each name of ``PRE_TOKENIZERS``."""
    from tokenizers import Regex, pre_tokenizers

    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _begins_with(named: dict[str, str], vocabulary: dict[str, int]) -> Any:
    from tokenizers import processors

    if "bos_token" not in named:
        raise ValueError("the GGUF file puts a token before every text, but has no tokenizer.ggml.bos_token_id")
    bos = named["bos_token"]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
