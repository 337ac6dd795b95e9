"""What stage 5 needs for models of the LLaMA 2 family on machines of eight GPUs, as --plan estimates it.

    python -m bench.plans        # a few seconds, without weights or GPUs

Texts of 512 tokens, 64 a step and node; masks off, a quarter of the kv heads. GiB are per GPU, of the usable
part of its memory; traffic is per GPU and step, within its node and between nodes; hours are for 100 million
tokens. Of the largest model --train attention trains the attention alone.
"""

from types import SimpleNamespace

from transformers import LlamaConfig

from common.reporting.tables import markdown_table
from common.training import plan as budget
from common.training import plan as training_cost
from common.training.hardware import parse_hardware

MODELS = {  # hidden, intermediate, layers, heads, kv heads
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "70B": (8192, 28672, 80, 64, 8),
}
MACHINES = ("8xA100-80GB", "8xH100-80GB", "8xH200-141GB", "2x8xA100-80GB", "8x8xA100-80GB")
TRAINED = {"7B": "all", "13B": "all", "70B": "attention"}  # --train
LENGTH, BATCH, TOKENS = 512, 64, 100_000_000  # tokens of a text, texts a step and node, tokens of training
HEADER = ["model", "machine", "--train", "GiB needed", "usable", "s a step", "GiB moved", "between nodes",
          "hours"]


def shape(name: str) -> LlamaConfig:
    """A model's config."""
    hidden, inner, layers, heads, kv_heads = MODELS[name]
    return LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, dtype="bfloat16",
    )  # fmt: skip


def row(model: str, machine: str, train: str) -> list[str]:
    """Cells below HEADER."""
    config, cluster = shape(model), parse_hardware(machine)
    student = budget.Student(config.num_key_value_heads // 4, (), train)
    batch = BATCH * cluster.nodes
    schedule = SimpleNamespace(batch=batch, tokens_per_microbatch=4096, reduce="step")
    for recompute in (False, True):
        work = budget.Workload(config, [LENGTH], [0], chunk=512, recompute=recompute)
        need, usable = budget.peak_memory(work, student, schedule, cluster)
        if need["total"] <= usable:
            break
    step = training_cost.step_cost(work, student, schedule, cluster)
    hours = TOKENS / LENGTH / batch * step.seconds / 3600
    note = ", too much" if need["total"] > usable else ", recomputed" if recompute else ""
    cells = [f"{need['total'] / 2**30:.0f}{note}", f"{usable / 2**30:.0f}", f"{step.seconds:.2g}",
             f"{step.traffic / 2**30:.3g}", f"{step.network / 2**30:.3g}", f"{hours:.2g}"]
    return [model, machine, train, *cells]


def main():
    rows = [row(model, machine, train) for model, train in TRAINED.items() for machine in MACHINES]
    print(markdown_table(HEADER, rows))


if __name__ == "__main__":
    main()
