"""A process computes with several threads, and forks; the child adds to a large tensor."""

import multiprocessing
import sys

import torch

import rallypoint

torch.set_num_threads(4)
x = torch.ones(10_000_000)
shared = rallypoint.SharedTensor(len(x))
shared.add_(x)  # now the threads are there


def work():
    shared.add_(x)
    shared.copy_(shared.tensor)
    shared.add_(x)


worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join(60)
if worker.exitcode != 0:
    worker.kill()
    sys.exit("the child hangs")
print(len(x), shared.tensor[-1].item())
