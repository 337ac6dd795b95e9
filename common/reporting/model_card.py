"""The README.md of an exported checkpoint: what it is, what it was made from and how, how to load it, and room for its scores."""

import os

GENERATE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained("{path}")
    prompt = tokenizer("{prompt}", add_special_tokens=False, return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))

In vLLM: `vllm serve PATH`; in llama.cpp: convert it with `convert_hf_to_gguf.py PATH`. Both read it as any model of its family.
"""
PROMPT = r"Question: Which is a metal?\nChoices: ['wood', 'iron']\nAnswer:"


def write(directory: str, path: str, alignment: dict, training: dict, export: dict) -> None:
    """Write README.md into `directory`, a checkpoint that will stand at `path`.

    alignment, training, export: the records of 04_align.py, 05_prune_train.py and of the export itself. 07_eval.py fills in
    the scores.
    """
    model, made, trained = alignment["model"], alignment["summary"], training["summary"]
    kv_heads, source = export["summary"]["kv_heads"], model["name"]
    hub = "/" in source and not os.path.exists(source)
    bits = {"torch.float32": 32}.get(export["summary"]["dtype"], 16)
    cache = [2 * model["layers"] * heads * model["head_dim"] * bits // 8 for heads in (model["kv_heads"], kv_heads)]
    by = {"none": "adjacent heads", "energy": "least loss of energy in closed-form merging"}.get(made["by"], f"similarity of {made['by']}s after alignment, by {made['criterion']}")
    merge = {"mean": "the mean of its rotated heads (generalized Procrustes)", "closed-form": "the best shared head in closed form"}[made["merge"]]
    how = "L0 masks moved each head from its own projection to its group's" if trained["masks"] == "l0" else "the merged model was trained directly, without masks"
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", *([f"base_model: {source}"] if hub else []), "tags: [gqa, kv-cache]", "---", "",
        f"# {os.path.basename(source.rstrip('/'))} with {kv_heads} key/value heads", "",
        f"A stock `{export['summary']['class']}` made from {f'[{source}](https://huggingface.co/{source})' if hub else f'`{source}`'} after *Align Attention Heads Before "
        f"Merging Them* (Jin et al., EMNLP 2025): {model['heads']} query heads share {kv_heads} key/value heads instead of {model['kv_heads']}. The KV cache takes {cache[1]:,} bytes per "
        f"token instead of {cache[0]:,} ({cache[1] / cache[0]:.1%}). Nothing but the usual libraries is needed to run it. The licence is that of the source.", "",
        "## Use", "", GENERATE.format(path=path, prompt=PROMPT),
        "It was trained on prompts of this form (Table 5 of the paper), followed by the text of the answer and the end-of-sequence token, and "
        "without a begin-of-sequence token; other uses lose what that fine-tuning of the source loses.", "",
        "## Scores", "", "<!-- scores -->", "Not evaluated yet: 07_eval.py puts them here.", "<!-- /scores -->", "",
        "## How it was made", "",
        f"- Groups: {by}.",
        f"- A group's shared key and value: {merge}{', then each W_O refitted by least squares' if made['refit'] else ''}; without training the perplexity went from "
        f"{made['perplexity_source']:.3f} to {made['perplexity_merged']:.3f} on the text of stage 4.",
        f"- Training: {trained['steps']} steps of {trained['batch']} samples ({trained['tokens']:,} tokens), learning rate {trained['lr']:g}, distilled from a fine-tuned teacher (KL + BiLD); {how}. "
        f"Last loss {trained['loss']:.4f}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in export['packages'].items())}; commit {export['commit']}; seed {training['arguments']['seed']}.",
        f"- Source: fingerprint `{model['fingerprint']}`.", "",
        "Heads of the source that share a key/value head, layer by layer:", "",
        *(f"{layer}. {'; '.join(' '.join(map(str, group)) for group in groups)}" for layer, groups in enumerate(alignment["groups"])), "",
    ]
    with open(os.path.join(directory, "README.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
