"""One `prompt` cell -> the token ids that the engine is given.

A cell is plain text, or a list of chat messages that goes through the tokenizer's chat template
with its generation prompt. Rules that hold for both:

- Exactly one BOS where the model has one: templates often write it and tokenizers add it again, so
  text is always encoded without special tokens and BOS is put in front only where it is missing.
- No EOS at the end, even from a tokenizer that appends one: the response goes on from here.
- Length limits act on these final ids, so system text, tools and the generation prompt all count.

Left out: images and audio (an error that names the row), and right truncation, which would cut off
the generation prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megappo.errors import DataError, UserError
from megappo.registry import did_you_mean

TRUNCATIONS = ("error", "left", "drop")
"""What happens to a prompt over the limit: stop, keep its last ids, or leave the row out."""


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any
    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The rendered text of a conversation, with `tokenize=False`."""


def render(
    cell: Any,
    tokenizer: ChatTokenizer,
    *,
    where: str,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of one prompt cell.

    Args:
        cell: text, or a non-empty list of `{role, content, ...}`, from Arrow, numpy or Python.
        tokenizer: of the policy.
        where: names the row in errors, "train row 3 (gsm8k.parquet)" say.
        template_args: more arguments of the chat template, such as `tools` or `enable_thinking`.

    Raises:
        DataError: the cell is neither, has a non-text part, is refused by the template, or empty.
    """
    cell = to_plain(cell)
    if isinstance(cell, str):
        text = cell
    elif isinstance(cell, list) and cell:
        messages = [_text_message(m, f"{where}, message {i}") for i, m in enumerate(cell)]
        text = _apply_template(messages, tokenizer, where=where, template_args=template_args or {})
    else:
        raise DataError(
            f"{where}: a prompt must be text or a non-empty list of messages, not "
            f"{_describe(cell)}; mend the row, or set data.prompt_key to the right column"
        )
    ids = _one_bos(list(tokenizer.encode(text, add_special_tokens=False)), tokenizer)
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens; fill the cell or remove the row")
    return ids


def fit(ids: list[int], *, max_length: int, truncation: str, where: str) -> list[int] | None:
    """The ids within `max_length` tokens, or None for a row that is to be dropped.

    `left` keeps the last `max_length` ids: the generation prompt stays, the beginning goes, and BOS
    with it.

    Raises:
        DataError: with truncation `error`, the prompt is too long.
        UserError: an unknown truncation, or a limit below 1.
    """
    check_truncation(truncation)
    if max_length < 1:
        raise UserError(
            f"data.max_prompt_length must be at least 1 token, not {max_length}; raise it"
        )
    if len(ids) <= max_length:
        return ids
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "drop":
        return None
    raise DataError(
        f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length "
        f"{max_length}; raise it to {len(ids)} or more, or set data.truncation to left or drop"
    )


def check_truncation(truncation: str) -> None:
    """Raises UserError for a name that is not in `TRUNCATIONS`."""
    if truncation not in TRUNCATIONS:
        raise UserError(
            f"unknown data.truncation {truncation!r}{did_you_mean(truncation, TRUNCATIONS)}"
        )


def to_plain(value: Any) -> Any:
    """Turns Arrow and numpy values into list, dict, str, int, float, bool, all the way down.

    Keys whose value is None are dropped: Arrow gives every dict of a column the union of the keys,
    so a None can mean "this row has no such key", and templates that test for the key must not see
    it. A None of the author's goes too, as the two cannot be told apart. None in a list stays.
    """
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    # By name, so that pyarrow is imported only where a value of it is at hand.
    if type(value).__module__.startswith("pyarrow"):
        return to_plain(_from_arrow(value))
    return value


def _from_arrow(value: Any) -> Any:
    import pyarrow as pa

    if isinstance(value, pa.Scalar):
        return value.as_py(maps_as_pydicts="strict")
    return value.to_pylist(maps_as_pydicts="strict")


def _text_message(message: Any, where: str) -> dict[str, Any]:
    """The message with its content as one string; other keys as they are."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{where}: a message must be a dict with a `role`, not {_describe(message)}; "
            "mend the row"
        )
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise DataError(
            f"{where}: content must be text or a list of text parts, not {_describe(content)}; "
            "mend the row"
        )
    return {**message, "content": "".join(_part_text(part, where) for part in content)}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
    raise DataError(
        f"{where}: only text parts can be trained on, found a part of type {kind!r}; "
        "remove such parts or such rows"
    )


def _apply_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    *,
    where: str,
    template_args: Mapping[str, Any],
) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: a list of messages needs a chat template, and this tokenizer has none; add "
            "chat_template.jinja to the model folder, or give the prompt as plain text"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **template_args
        )
    except TemplateError as error:
        roles = ", ".join(str(m["role"]) for m in messages)
        raise DataError(
            f"{where}: the chat template refuses these messages (roles: {roles}): {error}; "
            "mend the row or the template"
        ) from error
    return str(text)


def _one_bos(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """A single BOS in front if the tokenizer puts one before plain text, or the text had one."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    wanted = start > 0 or tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return ([bos] if wanted else []) + ids[start:]


def _describe(value: Any) -> str:
    return "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:60]!r}"
