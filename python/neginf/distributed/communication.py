"""torch.distributed, as the rest of the package uses it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Called all_gather_into_tensor and reduce_scatter_tensor before torch 2.14, where those are
# deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def process_group(group):
    """The ProcessGroup that `group` names: None for all ranks, a ProcessGroup or a DeviceMesh of
    one dimension."""
    if not dist.is_initialized():
        raise ValueError(
            "group: got a program without process groups; accepted is one after "
            "torch.distributed.init_process_group()"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: got a DeviceMesh of {group.ndim} dimensions; accepted is one dimension of "
                'it, as in mesh["cp"]'
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns to other ranks
        raise ValueError("group: got a group without this rank; accepted is one that it belongs to")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: got {type(group).__name__}; accepted is None, a ProcessGroup or a DeviceMesh "
            "of one dimension"
        )
    return group


def all_gather(tensor, group):
    """(size, *tensor.shape): the tensors of all ranks, which have one shape."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    if tensor.numel() != 0:
        _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=group)
    return gathered


def reduce_scatter(tensors, group):
    """tensors: (size, ...), one for each rank. The sum over all ranks of this rank's."""
    total = torch.empty_like(tensors[0])
    if total.numel() != 0:
        _reduce_scatter(total, tensors.flatten(0, 1), group=group)
    return total


def all_to_all(tensors, group):
    """tensors: (size, ...), one for each rank. (size, ...): what the ranks have for this one."""
    received = torch.empty_like(tensors)
    if tensors.numel() != 0:
        dist.all_to_all_single(received, tensors, group=group)
    return received


class Transfer:
    """Tensors on their way to the rank that is `distance` further, and as many, of the same shapes,
    from the one that is as far back.

    On CUDA they travel on a stream of the process group, after what is queued on the current one.
    """

    def __init__(self, sent, received, distance, group):
        self.sent, self.received = sent, received  # kept: they are in use until wait()
        size, rank = group.size(), group.rank()
        messages = []
        for ours, theirs in zip(sent, received, strict=True):
            if ours.numel() != 0:
                for operation, tensor, peer in (
                    (dist.isend, ours, rank + distance),
                    (dist.irecv, theirs, rank - distance),
                ):
                    messages.append(
                        dist.P2POp(operation, tensor, group=group, group_peer=peer % size)
                    )
        self.works = dist.batch_isend_irecv(messages) if messages else []

    def wait(self):
        """What was received. The current stream waits on CUDA, and the process elsewhere."""
        for work in self.works:
            work.wait()
        return self.received
