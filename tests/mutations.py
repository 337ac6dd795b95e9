"""One-line mutations, and the test that must fail for each: what `make mutants` tries.

Each entry: row of AUDIT.md (or the stage where it has no row), file, old text, new text, test, and for a mutation
that no test can notice the reason. See tests/mutants.py.
"""

# Imported once, before the first test run. None of the project's modules may be among them.
PACKAGES = [
    "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.utils.tensorboard",
    "transformers", "datasets", "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.generation", "torch._dynamo",
    "torch._inductor", "huggingface_hub", "jinja2", "filelock", "matplotlib.pyplot", "numpy",
    "scipy.linalg", "scipy.optimize", "scipy.stats", "scipy.special",
    "tensorboard.backend.event_processing.event_accumulator", "pytest", "tqdm",
]

MUTANTS = [
    ("Algorithm 2", "03_group.py", "anneal(matrix", "anneal(-matrix", "test_stages::test_alignment_record"),
]
