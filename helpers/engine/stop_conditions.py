"""The conditions that end an output: EOS, a stop token, a stop string, or max_tokens. Verbs and engine share them."""

from collections.abc import Container


def is_end_token(
    token_id: int, eos_token_ids: Container[int], ignore_eos: bool = False, stop_token_ids: Container[int] = ()
) -> bool:
    """Return whether a token ends an output by itself; the text of the output does not include such a token.

    Args:
        token_id: the newest token.
        eos_token_ids: the model's EOS tokens.
        ignore_eos: continue after these tokens, unless they are stop tokens, too.
        stop_token_ids: the request's own stop tokens.
    """
    return token_id in stop_token_ids or (token_id in eos_token_ids and not ignore_eos)


def finish_reason(stopped: bool, remaining: int) -> str | None:
    """Return why an output ends with its newest token, or None if it continues.

    Args:
        stopped: whether the token is an end token, or the text now contains a stop string.
        remaining: how many more tokens the output may have.

    Returns:
        "stop" if it is stopped, "length" if no tokens remain, else None.
    """
    if stopped:
        return "stop"
    return "length" if remaining <= 0 else None
