"""A converted model as a speculative draft of its source: tokens per pass of the source, as predicted or not.

    python -m bench.draft runs/mine/source runs/mine/gqa --draft-tokens 2 4

Twelve questions are answered greedily by the source, and again with drafts of g tokens (transformers'
assistant_model); the texts must be equal, but where rounding decides. The prediction takes each token of a
draft to agree with the source with probability a, whatever came before: (1 - a^(g + 1)) / (1 - a) tokens per
pass. a is measured on the source's texts: does the draft, which reads all before a token, predict it?
"""

import common.run.openmp  # noqa: F401 - before torch

import torch

from bench.answers import read_questions
from bench.machine import machine, median_ratio, timed
from common.evaluation.evaluate import prompt_ids
from common.models.load import load_model, load_tokenizer
from common.run.errors import UserError, run_stage
from common.run.flags import Parser, positive
from common.run.progress import Progress

PROMPTS = 12


def parse():
    flags = Parser(__doc__)
    flags.add_argument("source", help="checkpoint directory")
    flags.add_argument("draft", help="checkpoint directory of a conversion of it")
    flags.add_argument("--draft-tokens", type=positive, nargs="+", default=[2, 4], help="in a draft")
    flags.add_argument("--tokens", type=positive, default=48, help="of an answer, at most")
    return flags.parse_args()


def expected_tokens(agreement: float, draft_tokens: int) -> float:
    """The expected tokens of a pass: a draft's up to the first that differs, and one of the source's own."""
    return sum(agreement**count for count in range(draft_tokens + 1))


def answer(source, prompt: torch.Tensor, tokens: int, draft=None, draft_tokens: int = 0):
    """The source's greedy continuation of a prompt [1, T], [n] tokens, and its forward passes."""
    passes = []
    if draft:
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = draft_tokens, "constant"
        settings.assistant_confidence_threshold = 0  # a draft that is unsure goes on, too
    hook = source.register_forward_hook(lambda *_: passes.append(1))
    text = source.generate(prompt, do_sample=False, max_new_tokens=tokens, assistant_model=draft)
    hook.remove()
    return text[0, prompt.shape[1]:], len(passes)


def predicted(draft, prompt: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Whether each token of a text [n] after a prompt [1, T] is the draft's likeliest, given those before."""
    logits = draft(torch.cat((prompt, text[None]), dim=1)).logits[0, prompt.shape[1] - 1:-1]
    return logits.argmax(-1) == text


@torch.inference_mode()
def main() -> None:
    args = parse()
    source, draft, tokenizer = load_model(args.source), load_model(args.draft), load_tokenizer(args.source)
    rows = source.config.vocab_size
    if draft.config.vocab_size != rows:
        raise UserError(f"{args.draft}: expected a vocabulary of {rows} as in {args.source}, "
                        f"found {draft.config.vocab_size}")
    questions = [*read_questions()]
    questions = questions[:: len(questions) // PROMPTS][:PROMPTS]
    prompts = [torch.tensor([ids]) for ids in prompt_ids(questions, tokenizer)]
    agreed, results = [], {count: [] for count in (0, *args.draft_tokens)}  # 0: the source alone
    for prompt in Progress(prompts, "answers", unit="question"):
        for count, measured in results.items():
            measured.append(timed("cpu", answer, source, prompt, args.tokens, count and draft or None, count))
        agreed.append(predicted(draft, prompt, results[0][-1][0][0]))
    agreement = float(torch.cat(agreed).double().mean())
    print(f"agreement {agreement:.3f} on {sum(map(len, agreed))} tokens; {machine('cpu')}")
    alone, alone_seconds = zip(*results.pop(0), strict=True)
    for count, measured in results.items():
        answers, seconds = zip(*measured, strict=True)
        equal = sum(torch.equal(found, text) for (found, _), (text, _) in zip(answers, alone, strict=True))
        rate = sum(len(text) for text, _ in answers) / sum(passes for _, passes in answers)
        print(f"drafts of {count}: {rate:.2f} tokens per pass, predicted "
              f"{expected_tokens(agreement, count):.2f}; {equal} of {len(alone)} texts equal; "
              f"{median_ratio(seconds, alone_seconds):.2f} times the source's seconds")


if __name__ == "__main__":
    run_stage(main)
