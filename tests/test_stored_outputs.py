"""What the lessons store, token ids, texts and lengths, hangs on no near tie.

Another processor adds up its numbers in another order, and logits differ by about 1e-5. Where the best token leads
by less than that, a stored output would fail on another machine; so every prompt whose output is stored
must be chosen such that the best token leads clearly in every step.
"""

import pytest
import torch

from helpers import generate_continuous, load_model, workloads

CLEAR = 0.01

# Lesson 5 runs requests of lessons 2 and 3 again, beside the workloads; lesson 7 some of lessons 1 and 2.
LESSON_1 = ["What goes up", "Question: How do you bake bread?\nAnswer:", "Once upon a time, a lonely"]
LESSON_2 = ["The rain in Spain falls", "The quick brown fox jumped over the", "What comes up"]
LESSON_3 = [
    *("The rain in Spain", "The quick brown fox jumped", "What comes", "Many hands make", "Look"),
    *("Many hands", "What comes up must", "A rolling stone"),
]


def leads(requests):
    """For each request, by how much the best token's logit leads the second best, at the tightest step."""
    model, tokenizer = load_model()
    for output in generate_continuous(requests, 16).outputs:
        prompt = tokenizer(output.prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids], device=model.device)).logits[0]
        best, second = logits[len(prompt) - 1 : -1].topk(2).values.unbind(1)
        yield output.prompt, (best - second).min().item()


@pytest.mark.parametrize(
    "requests",
    [
        [(prompt, 400) for prompt in [*LESSON_1, *LESSON_2, *LESSON_3]],
        workloads.mixed(32),
        workloads.pages(8),
        workloads.one_beginning(),
        workloads.race(4, every=1, long=40),  # lesson 6 lets them run out of memory
        workloads.race(16, every=1, long=40),  # lesson 9 drafts for these
        workloads.race(5, every=1, long=100)[1:],
        workloads.told_again(),
    ],
    ids=["lessons", "mixed", "pages", "one_beginning", "stories", "16 stories", "4 stories", "told_again"],
)
def test_the_best_token_of_a_stored_output_leads_clearly_at_every_step(requests):
    tight = {prompt: round(lead, 4) for prompt, lead in leads(requests) if lead < CLEAR}

    assert tight == {}
