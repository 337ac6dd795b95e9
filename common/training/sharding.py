"""FSDP2: the process group, models built without memory, sharded, and filled from safetensors row by row."""

import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM

from common.cli import UserError
from common.models import open_checkpoint


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print once, from the first rank."""
        if self.first:
            print(text, flush=True)


def init_ranks() -> Ranks:
    """Join torchrun's process group (nccl with GPUs, else gloo); without torchrun, a group of one."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


@contextlib.contextmanager
def joined_ranks():
    """init_ranks for a block. All ranks leave it together, with the group taken down, so that none ends while the first writes."""
    ranks = init_ranks()
    yield ranks
    dist.barrier()
    dist.destroy_process_group()


class Trainee(nn.Module):
    """The root that FSDP shards: a causal language model, and the masks' log_alpha where there are masks.

    forward(row, head_loss) runs the decoder over one packed row and returns head_loss(hidden [T, hidden], lm_head), so
    that logits are formed where the loss wants them, a chunk at a time. Without head_loss it returns the hidden states.
    """

    def __init__(self, net, mask_shape: tuple[int, int] | None = None):
        super().__init__()
        self.net = net
        self.log_alpha = nn.Parameter(torch.empty(mask_shape, dtype=torch.float32)) if mask_shape else None

    def forward(self, row, head_loss=None):
        # use_cache=False lets transformers derive a block-diagonal mask from the restarting position ids
        own = {"sample_lengths": row.lengths} if self.net.config._attn_implementation == "packed" else {}
        output = self.net.model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, **own)
        hidden = output.last_hidden_state[0]
        return hidden if head_loss is None else head_loss(hidden, self.net.lm_head)


def mesh_of(ranks: Ranks):
    """One node: weights sharded over all ranks. Several: sharded within a node and replicated over nodes (HSDP), so that
    only gradients, reduced within their node first, travel between nodes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    if local == ranks.world:
        return init_device_mesh(ranks.device.type, (ranks.world,))
    return init_device_mesh(ranks.device.type, (ranks.world // local, local), mesh_dim_names=("nodes", "ranks"))


def build(config, ranks: Ranks, dtype: torch.dtype, compute: torch.dtype, sources=None, prepare=None, masks=None, recompute=False,
          attention: str = "packed") -> Trainee:
    """A sharded Trainee with weights in `dtype`, computing in `compute`, gradients reduced in float32.

    sources(name) -> (checkpoint directory, tensor name) says where each parameter of the model comes from; without it
    all are left for checkpoints.load to fill. prepare(model) changes the modules before they are sharded. masks: shape of
    log_alpha, left for the caller to fill. recompute: a layer keeps its input alone for the backward pass.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if prepare:
            prepare(model)
        trainee = Trainee(model, masks)
    options = {"mesh": mesh_of(ranks), "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    ignored = {trainee.log_alpha} if masks else None  # a few hundred numbers: every rank holds them all
    fully_shard(trainee, **options, reshard_after_forward=False, ignored_params=ignored)  # lm_head stays for the loss
    trainee.to_empty(device=ranks.device)
    model.tie_weights()
    rotary = model.model.rotary_emb  # its buffers are computed from the config, not stored
    model.model.rotary_emb = type(rotary)(config).to(ranks.device)
    if sources:
        load_rows(model, sources)
    if recompute:
        recompute_layers(model)
    return trainee.train()


def recompute_layers(model) -> None:
    """Activation checkpointing of every decoder layer, by the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


@torch.no_grad()
def load_rows(model, sources) -> None:
    """Fill each parameter with its rows: a rank reads from disk only what it keeps."""
    opened: dict[str, dict] = {}
    for name, parameter in model.named_parameters():
        directory, key = sources(name)
        if directory not in opened:
            opened[directory] = open_checkpoint(directory)
        if key not in opened[directory]:
            raise UserError(f"{directory}: expected a tensor {key}, found none")
        local, start = parameter, 0
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
            start = offset[0]
        if len(local):  # a rank may hold no rows of a small tensor
            local.copy_(opened[directory][key][start : start + len(local)])
