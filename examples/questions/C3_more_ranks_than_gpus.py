"""More ranks than GPUs, or none at all, and NCCL asked for.

    python examples/questions/C3_more_ranks_than_gpus.py

By itself torch says `invalid device ordinal` in one rank, `module 'torch._C' has no attribute
'_cuda_setDevice'` with a build for the CPU, and the other ranks wait. Here it is refused before
anything starts, with what was found: torch's build, the driver, the GPUs, and CUDA_VISIBLE_DEVICES
as it was given and as CUDA reads it.
"""

import torch

import rallypoint


def refusal(ranks: int) -> rallypoint.UsageError:
    try:
        rallypoint.launch(print, ("never",), nproc=ranks, backend="nccl")
    except rallypoint.UsageError as error:
        return error
    raise AssertionError("it was not refused")


def main() -> None:
    ranks = torch.cuda.device_count() + 1
    error = refusal(ranks)
    assert error.code == "device-missing"
    assert any(f"torch {torch.__version__} was built" in line for line in error.why), error.why
    assert any("CUDA_VISIBLE_DEVICES" in line for line in error.why), error.why
    assert error.help[-1][1] == f'launch(..., nproc={ranks}, backend="gloo")'
    print(error)


if __name__ == "__main__":
    main()
