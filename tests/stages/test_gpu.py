"""Every stage on a GPU against the same stage on the CPU: run by make gpu, skipped without a GPU.

    GPU_TESTS_ON=cpu python -m pytest tests/stages/test_gpu.py     # without a GPU, on one that is made up:

then what runs on the device rounds differently from the same on the CPU, as a GPU does.

Stage 5 has no --device: it takes the GPU wherever there is one. Its CPU runs are processes that see none.
With --deterministic no kernel of a training step may depend on the order of atomic additions.
"""

import json
import math
import os
import shutil
from types import SimpleNamespace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --deterministic: read when CUDA starts

import pytest
import torch
from safetensors.torch import load_file
from stand_in import StandIn, run

from common.data.decoding import Decoder
from common.data.generate import TEXT, Rows, sample
from common.method.losses import bild, cross_entropy, kl
from common.method.stats import LayerGrams, LayerStats
from common.models import attention
from common.models import load as models
from common.models.equivalence import max_difference
from common.models.head import Head
from common.models.load import load_model
from common.training import attention as training_attention
from common.training import engine
from common.training.attention import Trainee
from common.training.checkpoints import saved_checkpoints
from common.training.chunked import chunked
from common.training.engine import STOPPED, Step, clip_gradients
from common.training.packing import build_row
from common.training.sharding import Execution
from models import save_tiny, tiny_model
from reference import SCHEDULE, gqa_student, half_masked_student, random_samples, varlen_formula
from runs import (
    GROUPING,
    STAGE,
    assert_same_bits,
    assert_same_training,
    calibrate_arguments,
    calibrated_layer,
    copy_run,
    digests,
    evaluate_arguments,
    final_weights,
    interrupt,
    metrics,
    read,
    start,
    train_arguments,
    train_on_two_nodes,
    wait_for_step,
    with_teacher,
)
from torchrun import kill

DEVICE = StandIn("cpu") if os.environ.get("GPU_TESTS_ON") == "cpu" else "cuda"
GPUS = torch.cuda.device_count() or 2  # ranks of a run on all GPUs; on a CPU two
TOKENS = torch.randint(0, 256, (4, 60), generator=torch.Generator().manual_seed(5))
FEW = ["--steps", "6", "--seed", "1", "--tokens-per-microbatch", "200"]  # several rows
IN_FLOAT32 = [*FEW, "--dtype", "float32"]
LONG = [*FEW, "--steps", "40", "--deterministic"]
# Of the loss: weights and activations are rounded to 2^-9. Rounding also decides which of two near logits is
# BiLD's 16th, so single steps differ more, by up to 10 % on a CPU.
BF16_MEAN, BF16_STEP = 0.02, 0.2

pytestmark = pytest.mark.skipif(not (DEVICE == "cpu" or torch.cuda.is_available()), reason="needs a GPU")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Equal within this share of the largest expected element."""
    largest = float(expected.abs().max())
    torch.testing.assert_close(actual.to(expected), expected, rtol=0, atol=share * largest)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def sources(inputs, tmp_path_factory) -> dict[str, dict[str, str]]:
    """MHA with biases, and a GQA model whose keys may only be flipped."""
    gqa = save_tiny(tmp_path_factory.mktemp("gqa") / "model", model_type="qwen3", num_key_value_heads=4)
    return {"mha": inputs, "gqa": inputs | {"model": gqa}}


@pytest.fixture(scope="module", params=["mha", "gqa"])
def calibrated(request, sources, tmp_path_factory) -> tuple:
    """The inputs, and run directories after stages 1 to 3 on the CPU and on the device."""
    inputs, homes = sources[request.param], []
    for device in ("cpu", DEVICE):
        home = tmp_path_factory.mktemp(f"{request.param}-{device}") / "run"
        run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs), "--device", device)
        run("02_similarity.py", "--run", home, "--energy", "--device", device)
        run("03_group.py", "--run", home, *GROUPING)
        homes.append(home)
    return inputs, *homes


def train(home, inputs: dict[str, str], *flags, **options):
    return run(STAGE, *train_arguments(home, inputs, *flags), **{"device": DEVICE} | options)


@pytest.fixture(scope="module")
def alone(aligned_run, inputs, tmp_path_factory):
    """A run of stages 1 to 5, the last in one process on one GPU, in float32."""
    home = copy_run(aligned_run, tmp_path_factory.mktemp("alone") / "run")
    train(home, inputs, *IN_FLOAT32)
    return home


# stages 1 to 4


def test_grams_similarities_and_groups_are_those_of_the_cpu(calibrated):
    _, expected, home = calibrated
    same = []
    for index in range(3):
        actual, grams = (calibrated_layer(path / "calibration", index) for path in (home, expected))
        assert actual.keys() == grams.keys()
        for name, tensor in grams.items():
            assert_near(actual[name].double(), tensor.double(), 1e-5)
            same.append(torch.equal(actual[name], tensor))
    assert not all(same)  # or both were computed by the same kernels
    actual, similarity = (load_file(path / "similarity/similarity.safetensors") for path in (home, expected))
    assert actual.keys() == similarity.keys() and "energy" in actual
    for name, tensor in similarity.items():
        assert_near(actual[name], tensor, 1e-5)
    assert read(home / "groups/stage.json")["groups"] == read(expected / "groups/stage.json")["groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grams_are_exact_sums_of_the_vectors_in_any_dtype(dtype):
    """16-bit vectors go through a GPU's matrix units."""
    vectors = torch.randn(600, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums, exact = LayerStats(8, 16, DEVICE), vectors.double()
    for part in vectors.to(DEVICE).split(256):
        sums.update_values(part)
    grams = LayerGrams(sums.tensors(), 8)
    for kind, heads in (("raw", exact), ("unit", exact / exact.norm(dim=-1, keepdim=True))):
        assert_near(grams.value(kind), torch.einsum("nia,njb->ijab", heads, heads), 1e-5)


MERGES = {  # flags of stage 4 -> allowed difference of the merged logits, as a share of the largest
    (): 1e-4,
    ("--merge", "closed-form"): 1e-4,
    ("--merge", "closed-form", "--refit"): 1e-3,  # least squares: errors times the condition of the inputs
}
REFIT = ("--merge", "closed-form", "--refit", "attention")


def aligned_on(device: str, calibrated: tuple, home, *flags) -> dict:
    """Stage 4 on a device, from the CPU's calibration and groups. Returns its summary."""
    run("04_align.py", "--run", home, "--calibration", calibrated[1] / "calibration",
        "--groups", calibrated[1] / "groups", "--device", device, *flags)
    return read(home / "merged" / "stage.json")["summary"]


def logits_of(path) -> list[torch.Tensor]:
    """On the CPU."""
    with torch.no_grad():
        return list(load_model(str(path))(TOKENS).logits)


@pytest.mark.parametrize("flags", MERGES, ids=" ".join)
def test_aligned_passes_its_check_and_merged_is_that_of_the_cpu(calibrated, tmp_path, flags):
    summaries = {place: aligned_on(device, calibrated, tmp_path / place, *flags)
                 for place, device in (("host", "cpu"), ("device", DEVICE))}
    assert summaries["device"]["max_logit_difference"] <= 1e-4 and summaries["device"]["kl"] < 1e-8
    for figure in ("perplexity_source", "perplexity_aligned", "perplexity_merged"):
        assert summaries["device"][figure] == pytest.approx(summaries["host"][figure], rel=1e-3)
    expected, actual = (logits_of(tmp_path / place / "merged") for place in ("host", "device"))
    largest = max(float(rows.abs().max()) for rows in expected)
    assert max_difference(actual, expected) <= MERGES[flags] * largest


def test_the_attention_refit_gets_as_far_as_on_the_cpu(calibrated, tmp_path):
    """Training amplifies rounding: the held-out errors agree, not the weights."""
    expected, actual = (aligned_on(device, calibrated, tmp_path / place, *REFIT)["refit_layers"]
                        for place, device in (("host", "cpu"), ("device", DEVICE)))
    for layer, figures in enumerate(expected):
        for name in ("merged", "output", "attention"):
            assert actual[layer][name] == pytest.approx(figures[name], rel=0.02), (layer, name)


def test_layer_by_layer_the_same_bytes_are_written(calibrated, tmp_path):
    inputs, _, home = calibrated
    whole, layerwise = tmp_path / "whole", tmp_path / "layerwise"
    calibrate = ["--device", DEVICE, "--layerwise", *calibrate_arguments(inputs)]
    run("01_calibrate.py", "--run", layerwise, *calibrate)
    shutil.copytree(home / "calibration", whole / "calibration")
    aligned_on(DEVICE, calibrated, whole)
    aligned_on(DEVICE, calibrated, layerwise, "--layerwise")
    for name in ("calibration", "aligned", "merged"):
        assert digests(whole / name) == digests(layerwise / name)


# attention, losses, masks


WINDOW = {"model_type": "mistral", "sliding_window": 12}


@pytest.fixture
def varlen_calls(monkeypatch) -> list:
    """The calls of torch's kernel for samples of different lengths; on a CPU, of a formula in its place."""
    calls, kernel = [], varlen_formula if DEVICE == "cpu" else attention.varlen_attn

    def counted(*arguments, **options):
        calls.append(arguments)
        return kernel(*arguments, **options)

    if kernel:
        monkeypatch.setattr(attention, "varlen_attn", counted)
    if DEVICE == "cpu":
        monkeypatch.setattr(training_attention, "varlen_applies",
                            lambda weight, size: weight.dtype == torch.bfloat16)
    return calls


def expects_varlen(dtype) -> bool:
    """Whether stage 5 must use that kernel and not its substitute; it has done so from torch 2.11."""
    return dtype == torch.bfloat16 and (DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2}, WINDOW], ids=["mha", "gqa", "window"])
def test_attention_to_a_packed_row_is_that_of_one_sample_at_a_time(dtype, options, varlen_calls):
    """Hidden states and gradients, against eager attention to each sample alone in float32: at most twice as
    far off as the same in this dtype. Attention across samples is an error of 1.
    """
    samples = random_samples(5)
    model = {"head_dim": 32, "hidden_size": 64} | options  # a size that every fused kernel takes
    results = []
    for name, chosen in (("packed", dtype), ("eager", dtype), ("eager", torch.float32)):
        trainee = Trainee(tiny_model(attn_implementation=name, **model)).to(DEVICE, chosen)
        groups = [samples] if name == "packed" else [[sample] for sample in samples]
        rows = [trainee(build_row(group, len(samples)).to(DEVICE)) for group in groups]
        hidden = torch.cat(rows).float()
        weights = torch.linspace(-1, 1, hidden.numel(), device=DEVICE).view_as(hidden)
        (hidden * weights).sum().backward()
        results.append([hidden.detach(), *(p.grad.float() for p in trainee.net.model.parameters())])
    for packed, rounded, exact in zip(*results, strict=True):
        assert relative_error(packed, exact) <= max(2 * relative_error(rounded, exact), 1e-5)
    assert bool(varlen_calls) == expects_varlen(dtype)


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_chunked_losses_and_gradients_are_those_in_float64(dtype, close):
    """KL, cross-entropy and, without ties among logits, BiLD; gradients of the hidden states and the head."""
    generator, results = torch.Generator().manual_seed(0), []
    hidden, head, teacher = (torch.randn(shape, generator=generator).to(dtype)
                             for shape in ((40, 16), (100, 16), (40, 100)))
    for device, chosen in (("cpu", torch.float64), (DEVICE, dtype)):
        leaves = [part.to(device, chosen).requires_grad_() for part in (hidden, head)]
        expected = teacher.to(device, torch.promote_types(chosen, torch.float32))

        def loss(kind, at, logits, expected=expected):
            logits = logits.to(expected.dtype)
            if kind == "sft":
                return cross_entropy(logits, at + 3).sum()
            return {"kl": kl, "bild": bild}[kind](logits, expected[at]).sum()

        positions = torch.arange(40, device=device)
        pieces = [("kl", positions[:20]), ("sft", positions[30:])]
        pieces += [("bild", positions[20:30])] if dtype == torch.float32 else []
        total = chunked(loss, pieces, leaves[0], Head(SimpleNamespace(weight=leaves[1], bias=None)))
        total.backward()
        results.append([total.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for actual, expected in zip(*reversed(results), strict=True):
        assert_near(actual.double(), expected, close)


# stage 5


def test_training_in_float32_is_that_of_the_cpu(aligned_run, inputs, tmp_path):
    """Few steps: BiLD's top 16 is a choice that rounding flips now and then."""
    host, device = (copy_run(aligned_run, tmp_path / name) for name in ("host", "device"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")  # a process that sees no GPU
        train(host, inputs, *FEW, fresh=True, device="cpu")
    shutil.copytree(host / "teacher", device / "teacher")
    train(device, inputs, *IN_FLOAT32, "--no-recompute")
    assert_same_training(device, host)


def test_twenty_steps_in_bfloat16_stay_near_float32(alone, aligned_run, inputs, tmp_path):
    """The loss, masked and after the switch."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        home = with_teacher(aligned_run, alone, tmp_path / dtype)
        train(home, inputs, *FEW, "--steps", "20", "--dtype", dtype)
        losses.append([line["loss"] for line in metrics(home)])
    assert losses[0] != losses[1] and len(losses[0]) == 20
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=BF16_MEAN)
    for exact, rounded in zip(*losses, strict=True):
        assert rounded == pytest.approx(exact, rel=BF16_STEP)


@pytest.mark.parametrize("make_student", [half_masked_student, gqa_student],
                         ids=["masked", "gqa"])
@pytest.mark.parametrize("execution", [
    pytest.param(Execution(), id="float32"),
    pytest.param(Execution(compute=torch.bfloat16, recompute=True), id="bfloat16, recomputed"),
    pytest.param(Execution(compute=torch.bfloat16, compile=True), id="bfloat16, compiled",
                 marks=pytest.mark.skipif(DEVICE == "cpu", reason="compiles for minutes on a CPU")),
])
def test_a_step_is_queued_without_waiting_for_the_gpu(
    group_of_one, tmp_path, monkeypatch, make_student, execution, varlen_calls
):
    """torch raises an error where the host would wait; the first step still allocates and picks kernels."""
    student = make_student(group_of_one, tmp_path, execution=execution)
    rows = [build_row(random_samples(3, seed), 6) for seed in (0, 1)]
    rows = rows if DEVICE == "cpu" else [row.pinned() for row in rows]
    student.take(Step(student.job, SCHEDULE, rows, []))
    refuse_waits = (lambda mode: None) if DEVICE == "cpu" else torch.cuda.set_sync_debug_mode
    norms = []

    def clip_and_wait(trainee, clip):  # the first line of Step.update that may wait is after it
        norms.append(clip_gradients(trainee, clip))
        refuse_waits("default")
        return norms[-1]

    monkeypatch.setattr(engine, "clip_gradients", clip_and_wait)
    step = Step(student.job, SCHEDULE, rows, [])
    refuse_waits("error")
    try:
        student.take(step)
    finally:
        refuse_waits("default")
    assert float(step.totals["loss"]) > 0 and float(norms[0]) > 0
    assert step.totals["loss"].device.type == DEVICE
    assert bool(varlen_calls) == expects_varlen(execution.compute)


def test_a_killed_run_on_all_gpus_resumes_to_the_same_bits(alone, aligned_run, inputs, tmp_path):
    """SIGKILL to torchrun (nccl) and its ranks, between two checkpoints."""
    quiet, home = (with_teacher(aligned_run, alone, tmp_path / name) for name in ("quiet", "killed"))
    train(quiet, inputs, *LONG, processes=GPUS)
    process = start(home, inputs, *LONG, processes=GPUS)
    wait_for_step(home, 8)
    kill(process)
    assert saved_checkpoints(str(home / "train")) and not (home / "train" / "stage.json").exists()
    assert "resumes" in train(home, inputs, *LONG, processes=GPUS).stdout
    assert_same_bits(home, quiet)


several = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@several
@pytest.mark.parametrize("reduce", ["step", "row"])
def test_all_gpus_train_as_one_does(alone, aligned_run, inputs, tmp_path, reduce):
    """nccl against a group of one."""
    home = with_teacher(aligned_run, alone, tmp_path / "run")
    train(home, inputs, *IN_FLOAT32, "--reduce", reduce, processes=GPUS)
    assert_same_training(home, alone)


@several
def test_two_nodes_train_as_one_gpu_does(alone, aligned_run, inputs, tmp_path):
    """Two launchers with a GPU each: the weights are replicated, the gradients summed between them."""
    home = with_teacher(aligned_run, alone, tmp_path / "run")
    visible = ("", "") if DEVICE == "cpu" else ("0", "1")
    train_on_two_nodes(home, inputs, *IN_FLOAT32, processes=1, visible=visible)
    assert_same_training(home, alone)


@several
def test_a_run_of_one_gpu_goes_on_on_all(alone, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, alone, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, 2)
        train(home, inputs, *IN_FLOAT32, code=STOPPED)
    assert "resumes" in train(home, inputs, *IN_FLOAT32, processes=GPUS).stdout
    assert_same_training(home, alone)


# generated text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_text_is_drawn_from_the_softmax_by_captured_graphs_as_without(inputs, dtype):
    """Over several spans of the cache. Surprise less entropy, summed, is a standard normal number."""
    model, rows, length = load_model(inputs["model"], dtype, str(DEVICE)), 60, 150
    drawn = []
    for graphs in (True, True, False):
        decoder = Decoder(model, rows, length)
        assert (decoder.graphs is None) == (DEVICE == "cpu")
        decoder.graphs = decoder.graphs if graphs else None
        generator = torch.Generator(model.device).manual_seed(0)
        drawn.append(sample(decoder, Rows(TEXT, [[5]] * rows, length, model.device), generator))
    assert (drawn[0] == drawn[1]).all() and (drawn[0] == drawn[2]).all() and len({*drawn[0].flat}) > 50
    tokens = torch.from_numpy(drawn[0]).long()
    with torch.no_grad():
        log = load_model(inputs["model"])(tokens, use_cache=False).logits.double().log_softmax(-1)[:, :-1]
    surprise, entropy = -log.gather(-1, tokens[:, 1:, None])[..., 0], -(log.exp() * log).sum(-1)
    variance = (log.exp() * log**2).sum(-1) - entropy**2
    assert abs((surprise - entropy).sum() / variance.sum().sqrt()) < 3.5


# stages 6 and 7


def test_the_export_of_a_run_is_evaluated_as_on_the_cpu(alone, inputs, tmp_path):
    home = copy_run(alone, tmp_path / "run")
    run("06_export.py", "--run", home)
    stored, trained = load_model(str(home / "gqa")).state_dict(), final_weights(home)
    assert all(torch.equal(stored[name], tensor) for name, tensor in trained.items())
    results, outcomes = [], []
    for device in ("cpu", DEVICE):
        run("07_eval.py", "--run", home, *evaluate_arguments(inputs), "--device", device, "--force",
            "--dtype", "float32")
        results.append(read(home / "eval/stage.json")["results"])
        outcomes.append([json.loads(line) for line in (home / "eval/eval.jsonl").read_text().splitlines()])
    for name, expected in results[0].items():
        actual = results[1][name]
        assert actual["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
        assert actual["cache_bytes_per_token"] == expected["cache_bytes_per_token"]
        assert min(actual["prefill_tokens_per_s"], actual["decode_tokens_per_s"]) > 0
    for actual, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert actual["generated"] == expected["generated"]
        assert actual["likelihood_scores"] == pytest.approx(expected["likelihood_scores"], abs=1e-3)


@pytest.mark.parametrize("flags, close", [(["--layerwise", "--tasks", "none", "--dtype", "float32"], 1e-4),
                                          (["--dtype", "bfloat16", "--limit", "2"], 0.05)])
def test_perplexity_layer_by_layer_and_in_bfloat16(inputs, tmp_path, flags, close):
    losses = []
    for device, chosen in (("cpu", ["--layerwise", "--tasks", "none"]), (DEVICE, flags)):
        run("07_eval.py", "--run", tmp_path, "--model", inputs["model"], *evaluate_arguments(inputs), *chosen,
            "--device", device, "--force")
        losses.append(math.log(read(tmp_path / "eval/stage.json")["results"]["model"]["perplexity"]))
    assert losses[1] == pytest.approx(losses[0], rel=close)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_spread_over_gpus_has_the_same_metrics(inputs, tmp_path, monkeypatch):
    results = []
    for share in (0.7, 0):  # of a GPU's free memory that weights may take
        monkeypatch.setattr(models, "WEIGHT_SHARE", share)
        run("07_eval.py", "--run", tmp_path, "--model", inputs["model"], *evaluate_arguments(inputs),
            "--device", "cuda", "--force")
        results.append(read(tmp_path / "eval/stage.json")["results"]["model"])
    assert results[1]["perplexity"] == pytest.approx(results[0]["perplexity"], rel=1e-4)
    assert results[1]["cache_bytes_per_token"] == results[0]["cache_bytes_per_token"]
