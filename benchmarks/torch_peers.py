"""What torch has for the same work, each at its best: in chunks that are on their way together, several
threads, and the chunk that is fastest here, which is tried anew for every size and optimizer.

rpc     torch.distributed.rpc: chunks of the gradient go, the server steps each, its parameters come back
gloo    two ranks, all-reduce of the gradient chunk by chunk, each steps its copy of the parameters meanwhile
"""

from __future__ import annotations

import os
import time

from benchmarks.baselines import Remote, free_port, gradient_of, is_right, make_optimizer

CHUNKS_MIB = (1, 4, 16)  # and all in one
TRIES, SETTLING = 7, 2  # rounds with each, of which the first do not count
RPC_THREADS = 4  # at each end; 2 and 8 differ by less than runs do, 16 are slower over TCP


class Peers:
    """Two processes; `how` says which chunks were the fastest."""

    how = ""

    def __init__(self, peers: list[Remote]) -> None:
        self._peers = peers  # servers first, if there is one

    def setup(self, mib: int, optimizer: str) -> None:
        chunks = sorted({min(chunk, mib) for chunk in CHUNKS_MIB} | {mib})
        fastest = {}
        for chunk in chunks:
            self.begin(mib, optimizer, chunk)
            fastest[chunk] = min([self.round() for _ in range(TRIES)][SETTLING:])
        best = min(chunks, key=fastest.__getitem__)
        self.how = f"chunks of {best} MiB" if best < mib else "in one"
        self.begin(mib, optimizer, best)

    def begin(self, mib: int, optimizer: str, chunk_mib: int) -> None:
        raise NotImplementedError

    def round(self) -> float:
        raise NotImplementedError

    def cpu(self) -> list[float]:
        return [peer.cpu() for peer in self._peers]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


# ---------------------------------------------------------------- torch.distributed.rpc

_held: list[tuple] = []  # the server's (parameter, optimizer) of each chunk


def rpc_begin(sizes: list[int], optimizer: str) -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    _held[:] = [(parameter, make_optimizer(optimizer, parameter)) for parameter in parameters]


def rpc_step(number: int, gradient):
    parameter, optimizer = _held[number]
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach()


class RpcPeer:
    def __init__(self, rank: int, port: int, tcp_only: bool) -> None:
        import torch
        from torch.distributed import rpc

        torch.set_num_threads(1)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}",
            num_worker_threads=RPC_THREADS,
            **({"_transports": ["uv"], "_channels": ["basic"]} if tcp_only else {}),
        )
        rpc.init_rpc(("server", "trainer")[rank], rank=rank, world_size=2, rpc_backend_options=options)
        self._rpc, self._torch = rpc, torch

    def begin(self, mib: int, optimizer: str, chunk_mib: int) -> None:
        self._rounds, self._optimizer = 0, optimizer
        self._parameters = []
        self._gradients = gradient_of(mib << 18).split(chunk_mib << 18)
        self._rpc.rpc_sync("server", rpc_begin, args=([len(chunk) for chunk in self._gradients], optimizer))

    def round(self) -> float:
        start = time.perf_counter()
        futures = [self._rpc.rpc_async("server", rpc_step, args=each) for each in enumerate(self._gradients)]
        self._parameters = [future.wait() for future in futures]
        self._rounds += 1
        return time.perf_counter() - start

    def check(self) -> bool:
        return is_right(self._torch.cat(self._parameters), self._optimizer, self._rounds)


class Rpc(Peers):
    def __init__(self, tcp_only: bool) -> None:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        port = free_port()
        super().__init__([Remote(RpcPeer, rank, port, tcp_only) for rank in range(2)])
        self._trainer = self._peers[1]

    def begin(self, mib: int, optimizer: str, chunk_mib: int) -> None:
        self._trainer.ask("begin", mib, optimizer, chunk_mib)

    def round(self) -> float:
        return self._trainer.ask("round")

    def check(self) -> bool:
        return self._trainer.ask("check")


# ---------------------------------------------------------------- gloo


class GlooPeer:
    def __init__(self, rank: int, port: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self._dist, self._torch = dist, torch

    def begin(self, mib: int, optimizer: str, chunk_mib: int) -> None:
        self._rounds, self._name = 0, optimizer
        self._source = gradient_of(mib << 18) / 2  # the sum over both ranks is the gradient
        self._gradient = self._torch.empty_like(self._source)
        values = self._torch.zeros(mib << 18)
        self._parameters = [self._torch.nn.Parameter(part) for part in values.split(chunk_mib << 18)]
        for parameter, gradient in zip(self._parameters, self._gradient.split(chunk_mib << 18), strict=True):
            parameter.grad = gradient
        self._optimizers = [make_optimizer(optimizer, parameter) for parameter in self._parameters]

    def round(self) -> float:
        self._gradient.copy_(self._source)
        self._dist.barrier()
        start = time.perf_counter()
        works = [self._dist.all_reduce(parameter.grad, async_op=True) for parameter in self._parameters]
        for work, optimizer in zip(works, self._optimizers, strict=True):
            work.wait()
            optimizer.step()
        self._rounds += 1
        return time.perf_counter() - start

    def check(self) -> bool:
        return is_right(
            self._torch.cat([each.detach() for each in self._parameters]), self._name, self._rounds
        )


class Gloo(Peers):
    def __init__(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        port = free_port()
        super().__init__([Remote(GlooPeer, rank, port) for rank in range(2)])

    def _both(self, name: str, *arguments) -> list:
        for peer in self._peers:
            peer.begin(name, *arguments)
        return [peer.end() for peer in self._peers]

    def begin(self, mib: int, optimizer: str, chunk_mib: int) -> None:
        self._both("begin", mib, optimizer, chunk_mib)

    def round(self) -> float:
        return max(self._both("round"))

    def check(self) -> bool:
        return all(self._both("check"))
