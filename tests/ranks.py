"""Processes that are the ranks of a process group, for tests of what is spread over them."""

import io
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from targets import FEW_GPUS

TIMEOUT_SECONDS = 120
TWO_GPUS = pytest.param(
    ("cuda", 2),
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason=FEW_GPUS),
    id="cuda-2",
)


class Ranks:
    """`size` processes, started once and used by many tests. On the GPUs where `device` is cuda."""

    def __init__(self, size, store, device="cpu"):
        self.size = size
        self.requests = 0
        self.pipes, self.processes = [], []
        context = mp.get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, str(store), device), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        """What function(*args), a function of a test module, returns on each rank."""
        self.requests += 1
        for pipe in self.pipes:
            pipe.send_bytes(_to_bytes((self.requests, function, args)))
        results = [self._answer(rank) for rank in range(self.size)]
        errors = [error for _, error in results if error is not None]
        assert not errors, "\n".join(errors)
        return [result for result, _ in results]

    def _answer(self, rank):
        """That to the last request. One to an earlier request, which was given up after a timeout,
        may come first."""
        pipe = self.pipes[rank]
        while True:
            assert pipe.poll(TIMEOUT_SECONDS), f"rank {rank} does not answer"
            request, result, error = _from_bytes(pipe.recv_bytes())
            if request == self.requests:
                return result, error

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe, rank, size, store, device):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    while True:
        try:
            request, function, args = _from_bytes(pipe.recv_bytes())
        except EOFError:
            break
        try:
            reply = function(*args), None
        except Exception:
            reply = None, f"rank {rank}:\n{traceback.format_exc()}"
        pipe.send_bytes(_to_bytes((request, *reply)))
    dist.destroy_process_group()


def _to_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data):
    return torch.load(io.BytesIO(data), weights_only=False)


# ---- for functions that run on a rank


def here():
    """The device of this process, which is a rank."""
    return f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"


def dtype_here():
    """The kernels' own."""
    return torch.bfloat16 if here() != "cpu" else torch.float64


def lse_dtype_here():
    return torch.promote_types(dtype_here(), torch.float32)
