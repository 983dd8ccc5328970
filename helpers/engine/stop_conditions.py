"""The conditions that end an output: EOS, a stop token, a stop string, or max_tokens. Verbs and engine share them."""


def finish_reason(stopped: bool, remaining: int) -> str | None:
    """Return why an output ends with its newest token, or None if it continues.

    Args:
        stopped: whether the token is EOS or a stop token, or the text now contains a stop string.
        remaining: how many more tokens the output may have.

    Returns:
        "stop" if it is stopped, "length" if no tokens remain, else None.
    """
    if stopped:
        return "stop"
    return "length" if remaining <= 0 else None
