"""The capstone, the models behind its runs: a stand-in whose tokens no engine can guess, and the course's model.

Every token of the stand-in is a keyed hash of all that its row attends to: one wrong key in a block, one wrong
position, and the tokens are wrong. It takes microseconds, and unlike weights it can say which key was wrong.
"""

from hashlib import blake2b

from ..engine import Chunk, EngineConfig, Plan, SamplingParams, Sequence
from ..model_engine import Engine
from .engine_calls import Row

VOCABULARY, EOS, EOS_SHARE = 90, 17, 16  # every 16th token is EOS


class KeyedModel:
    """A stand-in for a language model.

    Args:
        secret: two models with different secrets generate different tokens.
    """

    eos_id = EOS

    def __init__(self, secret: str):
        self._secret = blake2b(secret.encode()).digest()

    def key(self, earlier: int, position: int, token: int) -> int:
        """Return the key of a token; `earlier` is what it attends to, see `attended`."""
        text = f"{earlier} {position} {token}".encode()
        return int.from_bytes(blake2b(text, key=self._secret, digest_size=8).digest())

    def next_tokens(self, rows: list[Row], keys: list[int]) -> list[int]:
        """Return the token after each row, whose last token has this key."""
        return [EOS if key % EOS_SHARE == 0 else (key // EOS_SHARE) % VOCABULARY for key in keys]

    def keys_of(self, text: list[int]) -> list[int]:
        keys, earlier = [], 0
        for position, token in enumerate(text):
            keys.append(self.key(earlier, position, token))
            earlier += attended(position, keys[-1])
        return keys

    def alone(self, prompt: list[int], most: int) -> list[int]:
        """Return the tokens that a request gets alone."""
        output, keys = [], self.keys_of(prompt)
        earlier = sum(attended(position, key) for position, key in enumerate(keys))
        while len(output) < most and EOS not in output:
            output += self.next_tokens([], keys[-1:])
            keys.append(self.key(earlier, len(keys), output[-1]))
            earlier += attended(len(keys) - 1, keys[-1])
        return output


def attended(position: int, key: int) -> int:
    """Return what a key adds to what later tokens attend to: equal keys at two positions count differently."""
    return key * (2 * position + 1)


class RealModel(KeyedModel):
    """The course's model on blocks, with the stand-in's keys beside it, which say what was wrong."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__("")
        settings = {"num_blocks": num_blocks, "block_size": block_size, "prefix_caching": False, "kernels": False}
        self._engine = Engine(config=EngineConfig(execution="ragged", linear_backend="pytorch", **settings))
        (self.eos_id,) = self._engine.model_info.eos_token_ids

    def alone(self, prompt: list[int], most: int) -> list[int]:
        return self._engine.generate([prompt], SamplingParams(most))[0].token_ids

    def next_tokens(self, rows: list, keys: list[int]) -> list[int]:
        plan = Plan()
        for row in rows:
            sequence = Sequence(row.request_id, [0] * row.start + row.token_ids, 1)
            sequence.computed = row.start
            plan.chunks.append(Chunk(sequence, len(row.token_ids), row.block_table))
        return self._engine.runner.forward(plan).argmax(dim=-1).tolist()
