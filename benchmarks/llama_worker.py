"""llama.cpp, called over pipes: one slot per row, and free slots are refilled at every step, as in llama-server.

Runs in llama-cpp-python's own environment; worker.py has the other side.
"""

import ctypes
import os
from collections import deque
from importlib.metadata import version
from pathlib import Path

import llama_cpp
import numpy as np
from to_gguf import convert
from worker import serve

HOME = Path(__file__).resolve().parent.parent / "build" / "bench" / "models"
BATCH = 2048  # the most tokens in a llama_decode call, which splits them itself
MOST_CONTEXT = 1024  # tokens of a row, which is enough for every workload; memory for all of them is allocated at once


class LlamaCpp:
    """llama.cpp's low-level API: Python decides which tokens a batch holds; everything else is compiled."""

    def load(self, folder: str, dtype: str, rows: int) -> dict:
        """Convert the model to GGUF if necessary, load it, and return the versions."""
        file = HOME / f"{Path(folder).name}-{dtype}.gguf"
        if not file.exists() or file.stat().st_mtime < Path(folder, "model.safetensors").stat().st_mtime:
            convert(Path(folder), dtype, file)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        context = min(llama_cpp.llama_model_n_ctx_train(self.model), MOST_CONTEXT)
        params.n_ctx, params.n_seq_max, params.n_batch = rows * context, rows, BATCH
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.kv_unified = False
        if dtype == "float32":  # the default, float16, would round keys and values
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {rows} x {context} tokens")
        self.rows = rows
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        return {"llama-cpp-python": llama_cpp.__version__, "gguf": version("gguf")}

    def run(self, requests: list) -> list[list[int]]:
        """Return the generated token ids for each (prompt ids, number of tokens, ...), always the best ones."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, False)
        outputs = [[] for _ in requests]
        waiting, slots = deque(range(len(requests))), {}  # slot -> index of its request
        while waiting or slots:
            self.batch.n_tokens = 0
            sampled = {}  # slot -> index of its last token in the batch
            for slot, index in slots.items():
                position = len(requests[index][0]) + len(outputs[index]) - 1
                sampled[slot] = self._add([outputs[index][-1]], position, slot)
            for slot in range(self.rows):
                if slot in slots or not waiting:
                    continue
                prompt = requests[waiting[0]][0]
                if self.batch.n_tokens + len(prompt) > BATCH:
                    break
                slots[slot] = waiting.popleft()
                sampled[slot] = self._add(prompt, 0, slot)
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status != 0:
                raise RuntimeError(f"llama_decode failed with status {status}")
            for slot, batch_index in sampled.items():
                index = slots[slot]
                outputs[index].append(self._best_token(batch_index))
                if len(outputs[index]) == requests[index][1]:
                    llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
                    del slots[slot]
        return outputs

    def _add(self, tokens: list[int], position: int, slot: int) -> int:
        """Append a slot's tokens to the batch, request logits for the last one, and return its index in the batch."""
        batch = self.batch
        for offset, token in enumerate(tokens):
            batch_index = batch.n_tokens
            batch.token[batch_index], batch.pos[batch_index] = token, position + offset
            batch.n_seq_id[batch_index], batch.seq_id[batch_index][0] = 1, slot
            batch.logits[batch_index] = offset == len(tokens) - 1
            batch.n_tokens += 1
        return batch_index

    def _best_token(self, batch_index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, batch_index)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return int(np.frombuffer(array, dtype=np.float32).argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
