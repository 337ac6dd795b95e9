"""What 05_prune_train.py --plan expects of the step that bench/train_step.py measures, and its memory."""

import bisect
import copy
from types import SimpleNamespace

import torch

from common.method import masks
from common.training import plan as budget
from common.training import plan as training_cost
from common.training.hardware import HARDWARE, Cluster, peak_flops

STATE = 12  # bytes per parameter of a student between steps: float32 weight and Adam's two moments


def student_of(config) -> budget.Student:
    """The masked student of the benchmark: a quarter of the kv heads."""
    return budget.Student(config.num_key_value_heads // 4, masks.KEY_VALUE)


def plain_and_gqa(config) -> int:
    """Parameters of the other two students, which the benchmark holds as well."""
    grouped = budget.Student(config.num_key_value_heads // 4, ())
    return budget.size(config).whole + budget.size(config, grouped).whole


def expected(config, samples: list, rows: list, args, world: int) -> dict[str, float]:
    """Memory per rank in GiB and, on a GPU of known speed, seconds of a masked step.

    rows: as packed for this rank. args: the benchmark's.
    """
    cuda = args.device == "cuda"
    work = budget.Workload.of(config, samples, args.loss_chunk, args.recompute, 2 if cuda else 4)
    student = student_of(config)
    longest = max(sum(row.lengths) for row in rows)
    need = budget.memory(work, student, world, longest, len(rows) > 1)
    figures = {"memory_gib": round(need["total"] / 2**30, 2)}
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak:
        hardware = next(device for device in HARDWARE.values() if device.flops_per_s == peak)
        schedule = SimpleNamespace(batch=args.batch * world, tokens_per_microbatch=args.tokens_per_microbatch,
                               reduce="step")
        cost = training_cost.step_cost(work, student, schedule, Cluster(world, hardware))
        figures["step_seconds"] = round(cost.seconds, 4)
    return figures


def fit_layers(config, samples: list, args, memory: float):
    """The config with as many of its layers as a GPU of `memory` bytes holds in all models of the benchmark.

    Raises ValueError if not even one fits.
    """
    config = copy.deepcopy(config)
    row = max(args.tokens_per_microbatch, *map(len, samples))

    def need(layers: int) -> float:
        config.num_hidden_layers = layers
        work = budget.Workload.of(config, samples, args.loss_chunk, args.recompute)
        return budget.memory(work, student_of(config), 1, row)["total"] + STATE * plain_and_gqa(config)

    counts = range(1, config.num_hidden_layers + 1)
    fitting = bisect.bisect_right(counts, budget.USABLE * memory, key=need)
    if not fitting:
        raise ValueError(f"one layer needs {need(1) / 2**30:.0f} GiB, of {memory / 2**30:.0f}")
    config.num_hidden_layers = fitting
    return config


def resident(job) -> int:
    """Bytes of a student's weights and optimizer state on this rank, between two steps."""
    tensors = list(job.trainee.parameters())
    for state in job.optimizer.state.values():
        tensors += [tensor for tensor in state.values() if torch.is_tensor(tensor)]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def peak_memory(step, others: int) -> float:
    """GiB on the GPU at most during step(), without the bytes that `others` hold meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return round((torch.cuda.max_memory_allocated() - others) / 2**30, 2)
