"""Run a checkpoint in a client, by its own interpreter: python pipelines/client_runs.py CLIENT REQUEST.

REQUEST is a JSON file: checkpoint, work (an empty directory), prompts (token ids; null: those of the texts),
texts, chat (messages or nothing), count. The result is pickled in REQUEST.answer: logits of every token
of every prompt [tokens, vocab] float32, greedy (at most count ids after each prompt), tokenized (ids of each
text, and of the chat), log_probabilities where the logits are normalized; or refusal, a line, alone.
"""

import json
import os
import pickle
import subprocess
import sys

import numpy as np


def tokenized(checkpoint: str, texts: list[str], chat: list) -> list[list[int]]:
    """As by this environment's transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    lines = [tokenizer(text)["input_ids"] for text in texts]
    if chat and tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        lines.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    return lines


def run_transformers(checkpoint, work, prompts, texts, chat, count):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32,
                                                 trust_remote_code=False).eval()
    logits, greedy = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits.append(model(ids).logits[0].numpy())
        settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
        greedy.append(generated[0, len(prompt):].tolist())
    return {"logits": logits, "greedy": greedy, "tokenized": tokenized(checkpoint, texts, chat)}


def run_mlx_lm(checkpoint, work, prompts, texts, chat, count):
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, _ = load(checkpoint)
    logits = [np.array(model(mx.array([prompt]))[0].astype(mx.float32)) for prompt in prompts]
    greedy = [[int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
              for prompt in prompts]
    return {"logits": logits, "greedy": greedy, "tokenized": tokenized(checkpoint, texts, chat)}


def run_ctranslate2(checkpoint, work, prompts, texts, chat, count):
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoTokenizer

    TransformersConverter(checkpoint).convert(work, force=True)
    generator = ctranslate2.Generator(work, compute_type="float32")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    tokens = [tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
    logits = [np.array(generator.forward_batch([line]))[0] for line in tokens]
    options = {"max_length": count, "sampling_topk": 1, "include_prompt_in_result": False}
    greedy = [generator.generate_batch([line], **options)[0].sequences_ids[0] for line in tokens]
    return {"logits": logits, "greedy": greedy, "tokenized": tokenized(checkpoint, texts, chat)}


def run_onnxruntime_genai(checkpoint, work, prompts, texts, chat, count):
    import onnxruntime_genai as og

    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", work,
               "-p", "fp32", "-e", "cpu", "-c", os.path.join(work, "cache")]
    done = subprocess.run(builder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("its model builder: " + done.stderr.strip().splitlines()[-1])
    model = og.Model(work)
    logits, greedy = [], []
    for prompt in prompts:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=len(prompt) + count)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        logits.append(np.array(generator.get_output("logits"))[0])
        while not generator.is_done():
            generator.generate_next_token()
        greedy.append(generator.get_sequence(0)[len(prompt):].tolist())
    tokenizer = og.Tokenizer(model)
    rendered = [tokenizer.apply_chat_template(json.dumps(chat), add_generation_prompt=True)] if chat else []
    lines = [tokenizer.encode(text).tolist() for text in [*texts, *rendered]]
    return {"logits": logits, "greedy": greedy, "tokenized": lines}


def run_vllm(checkpoint, work, prompts, texts, chat, count):
    from vllm import LLM, SamplingParams

    engine = LLM(checkpoint, dtype="float32", enforce_eager=True, max_logprobs=-1, max_model_len=512)
    sampling = SamplingParams(temperature=0, max_tokens=count, logprobs=-1, prompt_logprobs=-1)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    rows = [[[row[token].logprob for token in sorted(row)]  # the first token has no prediction
             for row in [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]] for output in outputs]
    return {"logits": rows, "greedy": [list(output.outputs[0].token_ids) for output in outputs],
            "tokenized": tokenized(checkpoint, texts, chat), "log_probabilities": True}


RUNS = {"transformers-5": run_transformers, "transformers-4": run_transformers, "mlx-lm": run_mlx_lm,
        "CTranslate2": run_ctranslate2, "onnxruntime-genai": run_onnxruntime_genai, "vLLM": run_vllm}


def main() -> None:
    name, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        if request["prompts"] is None:
            request["prompts"] = tokenized(request["checkpoint"], request["texts"], [])
        answer = RUNS[name](**request)
        answer["logits"] = np.concatenate(answer["logits"]).astype(np.float32)
    except Exception as error:  # a refusal is a result
        answer = {"refusal": " ".join(f"{type(error).__name__}: {error}".split())}
    with open(path + ".answer", "wb") as file:
        pickle.dump(answer, file)


if __name__ == "__main__":
    main()
