"""FSDP2: the process group, and models built on the meta device, sharded and loaded from safetensors."""

import contextlib
import datetime
import functools
import gc
import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from common.models.load import empty_model, kept_tensors, materialize
from common.models.weights import StoredWeights, shape_of
from common.run.errors import UserError
from common.training.attention import Trainee

# How long ranks wait for a silent one, which may hash a large model, or tokenize or generate text. Where one
# dies, torchrun ends the others.
TIMEOUT = datetime.timedelta(days=2)
KINDS_OF_PASS = 64  # at most: teacher and students, with and without gradients, rows of few or many tokens


@dataclass(frozen=True)
class Ranks:
    """This process's place in the process group."""

    rank: int
    world: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.world} {self.device.type}"

    @property
    def first(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def mesh(self):
        """What all models are sharded over; a mesh for each would make process groups for each.

        All ranks of one node; on several nodes models are sharded within and replicated across (HSDP): only
        gradients that are already reduced within a node travel between nodes.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        if local == self.world:
            return init_device_mesh(self.device.type, (self.world,))
        shape = (self.world // local, local)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("nodes", "ranks"))

    @contextlib.contextmanager
    def waiting(self):
        """Context manager: ranks leave it together, unless by an error."""
        yield
        dist.all_reduce(torch.zeros(()))  # by gloo: in a barrier of nccl they would keep their cores busy

    def say(self, text: str) -> None:
        """Print once, from the first rank."""
        if self.first:
            print(text, flush=True)


def interrupt(number: int, frame) -> None:
    """A handler of signals outside of training steps."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def signals_to(handler):
    """Context manager: signals that ask to stop go to a handler, but SIGHUP not where nohup ignores it.

    Slurm can send SIGUSR1 before a job's time is over.
    """
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass(frozen=True)
class Execution:
    """How a model is stored and run: it affects memory and speed, but results only by rounding."""

    weights: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    recompute: bool = False  # activation checkpointing of every decoder layer
    compile: bool = False  # every decoder layer, by torch.compile
    whole: bool = False  # gathered once a row, not layer by layer; a process by itself shards nothing


def init_ranks() -> Ranks:
    """Join torchrun's process group (nccl with GPUs, else gloo); without torchrun, a group of one.

    Raises UserError for more processes on this node than it has GPUs, if it has any.
    """
    cuda = torch.cuda.is_available()
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if cuda and processes > gpus:
        raise UserError(f"--nproc-per-node {processes}: expected at most {gpus}, the GPUs of this machine "
                        "(CUDA_VISIBLE_DEVICES= trains on its processor)")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, rank, world = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
        if processes == world:
            # torchrun's store outlives the ranks: those that it starts again would find the dead ones'
            # addresses. On several nodes each counts attempts of its own.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world)
    return Ranks(rank, world, device)


@contextlib.contextmanager
def joined_ranks():
    """init_ranks for a block. The ranks leave it together, so that none exits while the first is writing.

    Outside of training steps a signal that asks to stop is a KeyboardInterrupt. After an error a rank does
    not wait for the others: they may be waiting for it in another collective.
    """
    ranks = init_ranks()  # before the handler, which could not run while this waits for a rank that failed
    with signals_to(interrupt):
        try:
            yield ranks
            dist.barrier()
        except BaseException:
            if ranks.world == 1:
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def sum_over_ranks(leaves) -> None:
    """Sum the gradients of tensors that every rank holds unsharded; those without a gradient are skipped.

    Row losses are scaled by the number of ranks because FSDP averages: that factor is divided out here.
    """
    for leaf in leaves:
        if leaf.grad is not None:
            dist.all_reduce(leaf.grad)
            leaf.grad /= dist.get_world_size()


def reduce_gradients(trainee: Trainee, last: bool, every_row: bool) -> None:
    """Say how the next backward pass reduces gradients over ranks. last: of the step.

    Once a step moves the fewest bytes, but each rank holds the unsharded sums over its rows, in float32.
    With every_row they stay sharded: reduced within a node after every row, and between nodes once a step.
    """
    if not isinstance(trainee, FSDPModule):
        return
    if every_row:
        trainee.set_requires_all_reduce(last)
    else:
        trainee.set_requires_gradient_sync(last)


def release(trainee: Trainee) -> None:
    """Free the weights that FSDP keeps gathered after a forward pass without a backward pass."""
    if isinstance(trainee, FSDPModule):
        trainee.reshard()


def build(config, ranks: Ranks, execution: Execution, sources=None, prepare=None, replicated=None) -> Trainee:
    """A sharded Trainee whose gradients are reduced in float32, in evaluation mode: no dropout, no noise in
    routers, or a resumed training could not repeat its draws.

    sources(name) -> (checkpoint directory, tensor name) for each parameter of the model; without it, the
    parameters stay uninitialized until checkpoints.load. prepare(model) changes the modules before sharding.
    replicated: name -> initial value of each parameter that every rank holds unsharded.
    """
    model = empty_model("", config, execution.weights, ranks.device, attention="packed")
    if prepare:
        with torch.device("meta"):
            prepare(model)
    trainee = Trainee(model, replicated).eval()
    alone = execution.whole and ranks.world == 1
    if not alone:
        shard(trainee, ranks, execution)
    materialize(trainee, ranks.device)
    model.tie_weights()
    with torch.no_grad():
        for name, start in (replicated or {}).items():
            trainee.replicated[name].copy_(start)  # materialize discarded these, too
    if sources:
        load_rows(model, sources)
    if execution.recompute:
        recompute_layers(model)
    if execution.compile:
        compile_layers(model)
    if alone:
        compute_in(trainee, execution.compute)
    return trainee


def shard(trainee: Trainee, ranks: Ranks, execution: Execution) -> None:
    """Shard a model by FSDP2: each layer, gathered for each pass, and the rest with the root, gathered from
    the forward pass to its own backward pass, as the loss needs lm_head; if `whole`, all with the root.
    """
    precision = MixedPrecisionPolicy(  # OLMo 2 turns heads by cosines in float32, which are a layer's inputs
        param_dtype=execution.compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mesh": ranks.mesh, "mp_policy": precision}
    for layer in () if execution.whole else trainee.net.model.layers:
        fully_shard(layer, **options)
    ignored = set(trainee.replicated.parameters())
    fully_shard(trainee, **options, reshard_after_forward=False, ignored_params=ignored)


def compute_in(trainee: Trainee, dtype: torch.dtype) -> None:
    """Have all modules of the model compute with copies of their weights in `dtype`, as FSDP's ranks do, made
    before each forward pass: gradients are those of the weights, in theirs.

    A module finds an attribute in its __dict__ before its parameters, which keep their names.
    """
    places = [(vars(module), name, parameter) for module in trainee.net.modules()
              for name, parameter in module.named_parameters(recurse=False) if parameter.dtype != dtype]

    def copy_weights(*_):
        for attributes, name, _ in places:
            attributes.pop(name, None)  # of the row before, whose memory the new ones take
        copies = {id(parameter): parameter.to(dtype) for _, _, parameter in places}  # a tied one once
        for attributes, name, parameter in places:
            attributes[name] = copies[id(parameter)]

    if places:
        trainee.register_forward_pre_hook(copy_weights)


def recompute_layers(model) -> None:
    """Enable activation checkpointing of every decoder layer, under its name in any transformers version."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, "preserve_rng_state": False})  # nothing in a layer is random
    for layer in model.model.layers:
        layer.training = True  # which transformers asks for; the layer's parts stay in evaluation mode


def compile_layers(model) -> None:
    """Have torch.compile make kernels of every decoder layer when it first runs."""
    torch._dynamo.config.recompile_limit = KINDS_OF_PASS  # beyond it layers would silently run as they are
    for layer in model.model.layers:
        layer.compile()


def local_rows(parameter) -> list[int]:
    """The rows of a parameter that this rank holds, ascending and without gaps."""
    rows = torch.arange(len(parameter))
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        rows = distribute_tensor(rows, mesh, placements, src_data_rank=None).to_local()
    return rows.tolist()


@torch.no_grad()
def load_rows(model, sources) -> None:
    """Load what checkpoints keep; of parameters each rank reads only the rows it holds.

    Raises UserError for a tensor that is missing or has the wrong shape.
    """
    opened: dict[str, dict] = {}
    for name, parameter in kept_tensors(model).items():
        directory, key = sources(name)
        if directory not in opened:
            opened[directory] = StoredWeights(directory, model).open()
        if key not in opened[directory]:
            raise UserError(f"{directory}: expected a tensor {key}, found none")
        stored = opened[directory][key]
        shape = shape_of(stored)
        if shape != tuple(parameter.shape):
            raise UserError(f"{directory}: expected {key} of shape {list(parameter.shape)}, "
                            f"found {list(shape)}")
        if parameter.ndim == 0:  # a buffer
            parameter.copy_(stored[...])
            continue
        rows = local_rows(parameter)
        if rows:  # a small tensor may leave this rank without rows
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(stored[rows[0] : rows[-1] + 1])


def free_memory(ranks: Ranks) -> None:
    """Collect garbage now: modules contain reference cycles, which would keep their memory for longer."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
