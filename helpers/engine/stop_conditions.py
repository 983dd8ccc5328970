"""The conditions that end an output: EOS, a stop string, or max_tokens. The verbs and the engine share them."""

from collections.abc import Container


def finish_reason(
    token_id: int, remaining: int, eos_token_ids: Container[int], ignore_eos: bool = False, stopped: bool = False
) -> str | None:
    """Return why an output ends with its newest token, or None if it continues.

    Args:
        token_id: the newest token.
        remaining: how many more tokens the output may have.
        eos_token_ids: the tokens that end an output.
        ignore_eos: continue after these tokens, too.
        stopped: whether the text now contains a stop string.

    Returns:
        "stop" for EOS or a stop string, "length" if no tokens remain, else None.
    """
    if stopped or (token_id in eos_token_ids and not ignore_eos):
        return "stop"
    return "length" if remaining <= 0 else None
