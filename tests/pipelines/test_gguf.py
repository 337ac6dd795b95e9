"""pipelines/gguf.sh as a user runs it: mistakes at once; before a release, the tokens of some families.

The first of those tests builds llama.cpp.
"""

import random
import re
import shutil
import subprocess

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models import tiny_model
from runs import recipe

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 8, 2, 8, 320
FAMILIES = "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "olmo3"  # for Gemma and Phi-3 llama.cpp's
# converter takes no tokenizer but SentencePiece
PRE = {"qwen2": "qwen2"}  # transformers gives Qwen2 models Qwen2's pre-tokenizer; others keep GPT-2's


def refusal(done: subprocess.CompletedProcess) -> str:
    """The one error line, beside the converter's progress bar."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    line, = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


def save_gqa(path, family: str = "llama", seed: int = 0, kv_heads: int = KV_HEADS, **options) -> str:
    """A random GQA checkpoint with a small GPT-2 tokenizer; norm weights and biases are random too."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 96, "vocab_size": VOCABULARY + 8,
             "max_position_embeddings": 2048, "eos_token_id": 0, "pad_token_id": 0}
    tiny_model(seed, model_type=family, num_key_value_heads=kv_heads, **sizes | options).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False,
                                  initial_alphabet=alphabet)
    tokenizer.train([random.__file__], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(path)
    return str(path)


@pytest.mark.slow
def test_a_mistake_is_refused_before_anything_is_built():
    done = recipe("gguf.sh", "nowhere", PYTHON="false")
    message = "error: nowhere: expected a checkpoint directory, found no config.json in it\n"
    assert done.returncode == 2 and done.stderr == message and not done.stdout


@pytest.mark.release
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_generates_the_tokens_of_transformers(family, tmp_path):
    done = recipe("gguf.sh", save_gqa(tmp_path / "gqa", family), PRE=PRE.get(family, "gpt-2"), TOKENS="20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gguf: 6 of 6 prompts, 120 of 120 tokens equal to transformers; " in done.stdout
    assert "; 6 of 6 prompts tokenized alike; " in done.stdout
    differences = re.findall(r"logits within (\S+),", done.stdout)
    assert len(differences) == 6 and all(float(difference) < 1e-3 for difference in differences)
    sizes = rf"head_count_kv {KV_HEADS} of {HEADS} heads; KV cache (\S+) MiB for (\d+) tokens"
    mib, cells = re.search(sizes, done.stdout).groups()
    assert float(mib) == pytest.approx(int(cells) * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 / 2**20, abs=0.005)
    assert (tmp_path / "gqa.f32.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.release
def test_other_weights_heads_and_tokenizers_are_refused(tmp_path):
    checkpoint, out, prompts = save_gqa(tmp_path / "gqa"), tmp_path / "gqa.gguf", tmp_path / "prompts.txt"
    prompts.write_text("import random\n\ndef choice(self, seq):\n")
    settings = {"PROMPTS": str(prompts), "TOKENS": "8"}
    unknown = recipe("gguf.sh", checkpoint, out, **settings)
    assert "does not know this tokenizer" in refusal(unknown) and not out.exists()
    missing = recipe("gguf.sh", checkpoint, out, PRE="no-such", **settings)
    assert "llama.cpp cannot load it" in refusal(missing) and not out.exists()
    assert recipe("gguf.sh", checkpoint, out, PRE="gpt-2", **settings).returncode == 0
    converted = out.read_bytes()
    other_weights = recipe("gguf.sh", save_gqa(tmp_path / "other", seed=1), out, **settings)
    assert "expected the tokens of transformers, found 0 of 2 prompts" in refusal(other_weights)
    other_heads = recipe("gguf.sh", save_gqa(tmp_path / "mha", kv_heads=HEADS), out, **settings)
    assert f"expected head_count_kv {HEADS} " in refusal(other_heads)
    assert refusal(other_heads).endswith(f"found {KV_HEADS}")
    assert out.read_bytes() == converted


@pytest.mark.release
@pytest.mark.parametrize(("outtype", "share"), [("f32", 1.2), ("q8_0", 0.5), ("q4_0", 0.4)])
def test_what_quantization_changes_is_counted(outtype, share, tmp_path):
    (tmp_path / "prompts.txt").write_text("import random\n\ndef choice(self, seq):\n")
    settings = {"PROMPTS": str(tmp_path / "prompts.txt"), "TOKENS": "8", "PRE": "gpt-2", "OUTTYPE": outtype}
    text = shutil.copy(random.__file__, tmp_path / "text.txt")
    checkpoint = save_gqa(tmp_path / "gqa", head_dim=64)
    done = recipe("gguf.sh", checkpoint, **settings, TEXT=str(text), SEQUENCES="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"gguf: \d of 2 prompts, \d+ of 16 tokens equal", done.stdout)
    assert "perplexity of 1024 tokens" in done.stdout
    found = re.findall(r"cache (\S+): (\S+) in llama.cpp, (\S+) in transformers", done.stdout)
    assert [cache for cache, *_ in found] == ["float32", "q8_0", "q8_0/q4_0", "q4_0"]
    for cache, quantized, expected in found:
        exact = outtype == "f32" and cache == "float32"
        assert float(quantized) == pytest.approx(float(expected), rel=1e-4 if exact else 0.3)
    weights = (tmp_path / "gqa" / "model.safetensors").stat().st_size
    assert (tmp_path / f"gqa.{outtype}.gguf").stat().st_size < share * weights
    assert [path.name for path in tmp_path.glob("*.gguf*")] == [f"gqa.{outtype}.gguf"]
