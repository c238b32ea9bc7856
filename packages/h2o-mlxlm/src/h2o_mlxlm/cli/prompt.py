"""A prompt for a command: its text, its tokens, and the bar while it is read."""

import argparse
import sys
from typing import Any

_PLACE = "<query>"
"""Stands where a message will, as in mlx_lm's generate."""


def prompt_text(prompt: str) -> str:
    r"""Read the text of ``--prompt``: \n and \t are what they stand for, '-' is standard input.

    Raises:
        ValueError: There is none.
    """
    text = prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    if not text.strip():
        raise ValueError("the prompt is empty: pass --prompt TEXT, or '-' and text on standard input")
    return str(text)


def whole(args: argparse.Namespace, tokenizer: Any, text: str) -> list[int]:
    """The prompt as tokens, in the chat template unless told otherwise, as mlx_lm.generate does."""
    templated = _is_templated(args, tokenizer)
    return _tokens(tokenizer, _message(args, tokenizer, text) if templated else text, not templated)


def beginning(tokenizer: Any, text: str) -> list[int]:
    """The beginning of a prompt as tokens, as mlx_lm.cache_prompt does: the user's message is not over."""
    if not tokenizer.has_chat_template:
        return _tokens(tokenizer, text, True)
    messages = [{"role": "user", "content": text}]
    return _tokens(tokenizer, in_template(tokenizer, messages, continue_final_message=True), False)


def rest(args: argparse.Namespace, tokenizer: Any, text: str) -> list[int]:
    """The rest of a prompt as tokens, whose ``beginning`` a cache holds already.

    As mlx_lm.generate with a cache file, but the user's message stays with ``--prefill-response``, and
    without a template no second beginning-of-text token comes in the middle.
    """
    if _is_templated(args, tokenizer):
        at = _message(args, tokenizer, _PLACE).find(_PLACE)
        if at < 0:
            raise ValueError("the model's chat template does not show the message as it is: --ignore-chat-template")
        text = _message(args, tokenizer, text)[at:]
    return _tokens(tokenizer, text, False)


def _is_templated(args: argparse.Namespace, tokenizer: Any) -> bool:
    templated = not args.ignore_chat_template and tokenizer.has_chat_template
    if not templated and (args.system_prompt is not None or args.prefill_response is not None):
        raise ValueError("--system-prompt and --prefill-response need a chat template, and none is used")
    return bool(templated)


def _message(args: argparse.Namespace, tokenizer: Any, text: str) -> str:
    """The text of a chat with one message from the user."""
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    messages.append({"role": "user", "content": text})
    begun = args.prefill_response is not None
    if begun:
        messages.append({"role": "assistant", "content": args.prefill_response})
    more = args.chat_template_config or {}
    return in_template(tokenizer, messages, continue_final_message=begun, add_generation_prompt=not begun, **more)


def in_template(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Put messages into the model's chat template.

    Args:
        tokenizer: The model's.
        messages: Each with its role and content.
        options: The template's.

    Raises:
        ValueError: The template refuses them.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:
        # A template is the model's own code, and refuses messages with errors of any kind.
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def _tokens(tokenizer: Any, text: str, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not text in UTF-8: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=special))


class Progress:
    """A bar on standard error while a long prompt is read."""

    def __init__(self, total: int, show: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="prompt", unit="token", disable=not show, leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Show that so many of all tokens have been read."""
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
