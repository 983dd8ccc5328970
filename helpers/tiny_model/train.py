"""Rebuild the embedded model from nothing: corpus, tokenizer, weights and model card. Run `make tiny-model`.

With `ARGS=--draft`, a second, much smaller model is trained in the same way and for the same tokenizer. It is the draft
model of speculative decoding: right often enough, and quick.

Documents are packed into rows as long as the model's context. Positions restart at each document, and transformers
tells packed documents apart by these positions. So the model learns every document as it will later be generated: from
position 0, with nothing before it.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ..hardware import cpuinfo
from . import corpus

FOLDER = Path(__file__).parent
DRAFT_FOLDER = FOLDER / "draft"
EOS = "<|endoftext|>"
CONTEXT, MAX_ENTRIES = 512, 2048  # BPE stops earlier, once every word of the corpus is one token
ROWS, STEPS, PEAK_LEARNING_RATE = 8, 3000, 2e-3
SHAPE = {"n_embd": 160, "n_layer": 4, "n_head": 5}  # heads of 32 dimensions, a size that other engines support
DRAFT_SHAPE, DRAFT_STEPS, DRAFT_LEARNING_RATE = {"n_embd": 64, "n_layer": 1, "n_head": 2}, 1000, 6e-3


# The training text has questions and answers, and ends an answer with EOS.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "assistant" %}Answer: {{ message.content }}<|endoftext|>
{%- elif message.role == "user" %}Question: {{ message.content }}
{% else %}{{ message.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}Answer:{% endif %}"""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's: it can encode any text, and EOS is token 0."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=MAX_ENTRIES,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        padding_side="left",
        model_max_length=CONTEXT,
        # transformers 4 would also return token_type_ids, and GPT-2 adds an embedding for each.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def packed_rows(tokenizer, seed: int, rewrite: Callable[[str], str] = str):
    """Yield rows (token_ids, position_ids, labels) of CONTEXT tokens each, filled with whole documents, without end.

    Each document is rewritten first; by default, it stays as it is.
    """
    texts = itertools.chain.from_iterable(corpus.documents(1000, seed) for seed in itertools.count(seed * 1_000_000))
    ids, positions = [], []
    for text in texts:
        document = [*tokenizer(rewrite(text))["input_ids"], tokenizer.eos_token_id]
        if len(document) > CONTEXT:
            continue  # a story of many chapters: about one document in ten thousand
        if len(ids) + len(document) > CONTEXT:
            padding = CONTEXT - len(ids)
            labels = ids + [-100] * padding
            # The positions of the padding count from 0 like those of a document, so no document attends to it.
            yield ids + [tokenizer.eos_token_id] * padding, positions + list(range(padding)), labels
            ids, positions = [], []
        ids += document
        positions += range(len(document))


def batches(tokenizer, seed: int, rewrite: Callable[[str], str] = str):
    """Yield token ids, position ids and labels, [ROWS, CONTEXT] each, without end."""
    rows = packed_rows(tokenizer, seed, rewrite)
    while True:
        yield torch.tensor([next(rows) for _ in range(ROWS)]).unbind(1)


def new_model(tokenizer, shape: dict[str, int] = SHAPE) -> GPT2LMHeadModel:
    """Return the model with random weights."""
    eos = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        **shape,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return GPT2LMHeadModel(config)


def loss_of(model, batch) -> torch.Tensor:
    """Return the mean cross-entropy per token in nats; transformers shifts the labels itself.

    At a document's last token (EOS), the shifted label is the first token of the next document, which no model can
    predict. It is left out.
    """
    ids, positions, labels = batch
    labels = labels.masked_fill(positions == 0, -100)
    return model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss


def held_out_loss(model, tokenizer, steps: int = 20, rewrite: Callable[[str], str] = str) -> float:
    """Return the loss on documents from a seed that training never uses."""
    held_out = itertools.islice(batches(tokenizer, 999, rewrite), steps)
    with torch.no_grad():
        return sum(loss_of(model, batch).item() for batch in held_out) / steps


def train(
    model, tokenizer, seed: int, steps: int, peak_learning_rate: float, rewrite: Callable[[str], str] = str
) -> None:
    """Train the model for this many optimizer steps. Parameters that need no gradient stay as they are."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_learning_rate,
        betas=(0.9, 0.95),
    )
    warmup = min(100, steps // 10)

    def rate(step):  # of the peak: linear warm-up, then half a cosine down to a twentieth
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    has_bf16 = "bf16" in str(cpuinfo())  # such instructions halve the time, and without them it is a multiple
    bar = tqdm(itertools.islice(batches(tokenizer, seed, rewrite), steps), total=steps, desc="train", unit="step")
    for batch in bar:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


HEADER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

"""
CARD = """# The embedded model

A language model with the GPT-2 architecture, small enough for the repository and good enough to be read: it
writes sayings, answers and short stories, and ends each by itself. With it, every lesson runs without a GPU
and without a network.

| | |
| --- | --- |
| architecture | GPT-2: {layers} layers, width {width}, {heads} heads of {head_dim} dimensions, context {context} |
| parameters | {parameters:,} ({megabytes:.1f} MB in fp32) |
| tokenizer | byte-level BPE, {vocabulary} entries, EOS and padding `{eos}` (id {eos_id}) |
| training text | written by `corpus.py`, seed {seed}: {tokens:,} tokens in {steps:,} steps of {rows} rows |
| loss | {loss:.3f} nats per token on held-out documents ({perplexity:.2f} perplexity) |
| training time | {minutes:.0f} minutes on {threads} CPU threads, torch {torch} |
| licence | Apache-2.0, weights included |

`make tiny-model` rebuilds the tokenizer, the weights and this card. The same seed, machine, thread count and
library versions give the same weights. The kernels of another CPU round differently, and the weights drift apart.

**Two LoRA adapters** are in `adapters/`, in PEFT's format, with rank 4 and 94 kB each. To `sea`, every animal lives in
the sea; `honest` vouches for every sentence. `make tiny-adapters` trains them, again whenever the weights change.

**What it cannot do.** It knows about {words} words and nothing else: no facts, no instructions, no other language,
no code. Its stories follow the grammar of `corpus.py`, and any other prompt is continued with fluent nonsense
in the same style. It has memorised sums up to nine plus nine. Use it to study how text is served, not for its text.
"""
DRAFT_CARD = """# The draft model of the embedded model

A language model with the embedded model's tokenizer and an eighth of its parameters. It guesses the embedded model's
next tokens for speculative decoding: `EngineConfig(speculative="draft")`. Its own texts are worse.

| | |
| --- | --- |
| architecture | GPT-2: {layers} layer, width {width}, {heads} heads of {head_dim} dimensions, context {context} |
| parameters | {parameters:,} ({megabytes:.1f} MB in fp32) |
| training text | written by `corpus.py`, seed {seed}: {tokens:,} tokens in {steps:,} steps of {rows} rows |
| loss | {loss:.3f} nats per token on held-out documents ({perplexity:.2f} perplexity) |
| training time | {minutes:.0f} minutes on {threads} CPU threads, torch {torch} |
| licence | Apache-2.0, weights included |

`make tiny-model ARGS=--draft` rebuilds it.
"""


def save(model, tokenizer, folder: Path, card: str, **facts) -> None:
    """Write model, tokenizer and model card; `facts` are what the card says about the training."""
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a tokenizer class that transformers 4 and other engines do not know.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    config = model.config
    text = (HEADER + card).format(
        layers=config.n_layer,
        width=config.n_embd,
        heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        context=CONTEXT,
        parameters=model.num_parameters(),
        megabytes=model.num_parameters() * 4 / 1e6,
        vocabulary=len(tokenizer),
        eos=EOS,
        eos_id=tokenizer.eos_token_id,
        rows=ROWS,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        **facts,
    )
    (folder / "README.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft", action="store_true", help="train the draft model, for the same tokenizer")
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {STEPS}; {DRAFT_STEPS} with --draft)")
    options = parser.parse_args()
    if options.draft:
        folder, card, shape, steps, rate = DRAFT_FOLDER, DRAFT_CARD, DRAFT_SHAPE, DRAFT_STEPS, DRAFT_LEARNING_RATE
    else:
        folder, card, shape, steps, rate = FOLDER, CARD, SHAPE, STEPS, PEAK_LEARNING_RATE
    steps = options.steps or steps

    start = time.perf_counter()
    torch.manual_seed(options.seed)
    texts = list(corpus.documents(20_000, options.seed))
    tokenizer = train_tokenizer(texts)
    model = new_model(tokenizer, shape)
    train(model, tokenizer, options.seed, steps, rate)
    loss = held_out_loss(model, tokenizer)
    save(
        model,
        tokenizer,
        folder,
        card,
        seed=options.seed,
        steps=steps,
        tokens=steps * ROWS * CONTEXT,
        loss=loss,
        perplexity=math.exp(loss),
        minutes=(time.perf_counter() - start) / 60,
        words=round(len({word for text in texts for word in text.lower().replace('"', " ").split()}), -2),
    )
    print(f"held-out loss {loss:.3f} nats per token; saved to {folder}")


if __name__ == "__main__":
    main()
